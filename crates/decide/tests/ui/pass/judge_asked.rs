use hotcell_decide::{Judge, Ruling};

fn ask(judge: &Judge) -> Ruling<'_> {
    judge.ruling()
}

fn main() {
    let _ = ask;
}
