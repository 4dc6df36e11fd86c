//! PID 1 of the guest. See the library's documentation.
#![forbid(unsafe_code)]

fn main() {
    hotcell_guest::init()
}
