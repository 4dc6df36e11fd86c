//! placeholder
pub(crate) fn run() -> i32 {
    0
}
