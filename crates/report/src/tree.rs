//! The processes that the host saw in the guest's memory, children below their parents.
//!
//! Whatever a record says of who whose child is, each is shown once, at a depth that has a bound. A number may be used
//! again: a child belongs to the latest of its parent's number that was seen no later than itself.

use hotcell_verify::Seen;
use maud::{Markup, html};
use std::collections::BTreeMap;

/// Steps to the right at most.
const MAX_DEPTH: usize = 16;

/// Draws it; nothing where none was seen.
pub(crate) fn draw(seen: &[Seen], begun: u64) -> Markup {
    let rows = rows(seen);
    html! {
        @if !rows.is_empty() {
            h2 { "Processes" }
            p {
                "As the host read them in the machine's memory, when it first saw each under its program. One that lived shorter "
                "than the time between two looks may be missing."
            }
            table {
                tr { th { "ms" } th { "process" } th { "user" } th { "program" } th { "arguments" } }
                @for (depth, one) in rows {
                    tr {
                        td class="n" { (one.timestamp_ns.saturating_sub(begun) / 1_000_000) }
                        td style={ "padding-left:" (depth) ".6em" } { (one.process.pid) " " (one.process.name) }
                        td class="n" { (one.process.user) }
                        td class="d" { (one.process.executable) }
                        td class="d" { (one.process.argv) }
                    }
                }
            }
        }
    }
}

/// Everybody once, with the depth.
fn rows(seen: &[Seen]) -> Vec<(usize, &Seen)> {
    let mut latest: BTreeMap<i32, usize> = BTreeMap::new();
    let mut below: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    let mut roots = Vec::new();
    for (at, one) in seen.iter().enumerate() {
        // Only those before it are there yet, so there are no circles.
        match latest.get(&one.process.parent) {
            Some(parent) => below.entry(*parent).or_default().push(at),
            None => roots.push(at),
        }
        // The same process under another program stays where its children look for it.
        let same = latest.get(&one.process.pid).and_then(|before| seen.get(*before));
        if same.is_none_or(|before| before.process.parent != one.process.parent) {
            latest.insert(one.process.pid, at);
        }
    }
    let mut rows = Vec::with_capacity(seen.len());
    let mut next: Vec<(usize, usize)> = roots.into_iter().rev().map(|at| (0, at)).collect();
    while let Some((depth, at)) = next.pop() {
        rows.extend(seen.get(at).map(|one| (depth, one)));
        let children = below.remove(&at).unwrap_or_default();
        next.extend(children.into_iter().rev().map(|child| ((depth + 1).min(MAX_DEPTH), child)));
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use hotcell_verify::SeenProcess;

    fn seen(pid: i32, parent: i32, name: &str) -> Seen {
        let (name, executable, argv) = (name.to_owned(), "/bin/x".to_owned(), "<b>".to_owned());
        Seen {
            timestamp_ns: 7_000_000,
            process: SeenProcess { pid, parent, user: 1000, name, executable, argv },
        }
    }

    fn shape(all: &[Seen]) -> Vec<(usize, &str)> {
        rows(all).into_iter().map(|(depth, one)| (depth, one.process.name.as_str())).collect()
    }

    #[test]
    fn children_stand_below_their_parents_and_everybody_is_there_once() {
        let all =
            [seen(5, 1, "sh"), seen(9, 1, "other"), seen(6, 5, "make"), seen(7, 6, "cc"), seen(5, 1, "exec")];
        let expected = [(0, "sh"), (1, "make"), (2, "cc"), (0, "other"), (0, "exec")];
        assert_eq!(shape(&all), expected);
    }

    #[test]
    fn circles_and_endless_chains_are_a_bounded_drawing() {
        assert_eq!(shape(&[seen(1, 1, "a"), seen(2, 3, "b"), seen(3, 2, "c")]).len(), 3);
        let chain: Vec<Seen> = (1..1000).map(|pid| seen(pid, pid - 1, "x")).collect();
        assert!(rows(&chain).iter().all(|(depth, _)| *depth <= MAX_DEPTH));
        assert_eq!(rows(&chain).len(), 999);
    }

    #[test]
    fn what_the_guest_named_is_escaped_and_no_process_is_no_table() {
        let drawn = draw(&[seen(5, 1, "<script>")], 0).into_string();
        assert!(drawn.contains("&lt;script&gt;") && !drawn.contains("<script>"), "{drawn}");
        assert_eq!(draw(&[], 0).into_string(), "");
    }
}
