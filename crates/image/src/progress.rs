//! How a build tells what it does. The library never touches a terminal.

/// Who is told.
pub trait Progress {
    /// A new step begins.
    fn step(&mut self, text: &str);
    /// So many bytes of the step are done, of so many if that is known. Called often.
    fn bytes(&mut self, _done: u64, _total: Option<u64>) {}
    /// Something that the user should know about the result.
    fn note(&mut self, text: &str) {
        self.step(text);
    }
}

/// Tells nobody.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Progress for Silent {
    fn step(&mut self, _text: &str) {}
}
