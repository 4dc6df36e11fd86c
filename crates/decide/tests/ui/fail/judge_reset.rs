//! The switch has no way back and no way to be quieted.
use hotcell_decide::Judge;

fn quiet(judge: &mut Judge) {
    judge.reset();
    judge.disable();
    judge.set_denial_burst(1000);
    judge.trip = None;
}

fn main() {
    let _ = quiet;
}
