//! A page for people, from a bundle that was found intact.
//!
//! What it is for: [`render`] takes a [`VerifiedBundle`], which only verification makes, so that no page can show a
//! record that nobody checked. `report.json` is not read: what the page says is recomputed.
//! What it guarantees: everything out of the bundle is escaped by the template; the page loads nothing and runs nothing
//! (no script, no outside style); at most [`MAX_MOMENTS`] events are shown, the first and the last, and how many are not is
//! said; the drawing above them has all of them (`strip.rs`).
//! What it does not: judge.
//! Who may call: the command line.
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)
)]

mod strip;
mod tree;

use hotcell_verify::{Moment, VerifiedBundle, counted, to_text};
use maud::{DOCTYPE, PreEscaped, html};
use std::io;

/// Events on a page at most: a browser copes with some thousands of rows.
pub const MAX_MOMENTS: usize = 5000;
/// Of these the last: how a run ended is what one looks for.
const LAST_MOMENTS: usize = 500;
/// Characters of one event's detail at most.
const MAX_DETAIL: usize = 600;

const STYLE: &str = "body{font:15px/1.5 sans-serif;margin:2em auto;max-width:70em;padding:0 1em;color:#222}\
h1{font-size:1.4em}.verdict{font-size:1.2em;font-weight:bold}.ALLOWED{color:#186a2a}.KILLED,.FAILED{color:#a3180e}\
pre{background:#f4f4f2;padding:1em;overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:13px}\
td,th{border-bottom:1px solid #ddd;padding:.25em .6em;text-align:left;vertical-align:top}td.n{text-align:right}\
td.d{font-family:monospace;overflow-wrap:anywhere}tr.said{color:#666;font-style:italic}tr.kill{background:#fde8e6}\
svg.strip{width:100%;font:12px sans-serif}svg.strip .base{stroke:#ddd}svg.strip .time{fill:#666}svg.strip rect{fill:#4a6785}\
svg.strip .lane2{fill:#186a2a}svg.strip .lane4{fill:#999}svg.strip .lane5{fill:#a3180e}\
svg.strip .broken{stroke:#a3180e;stroke-dasharray:4 3}";

/// The page.
///
/// # Errors
/// The bundle can't be read, or changed after it was verified.
pub fn render(bundle: &VerifiedBundle) -> io::Result<String> {
    let verification = bundle.verification();
    let timeline = bundle.timeline(MAX_MOMENTS - LAST_MOMENTS, LAST_MOMENTS)?;
    let begun = timeline.first.first().map_or(0, |moment| moment.timestamp_ns);
    let run = verification.run_id().unwrap_or("a run without a name");
    let verdict = verification.derived.verdict;
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'";
                title { "Hotcell: " (run) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                h1 { "Run " (run) }
                p class={ "verdict " (verdict) } {
                    (verdict)
                    @if !verification.derived.reasons.is_empty() {
                        ": " (verification.derived.reasons.join(", "))
                    }
                }
                @for why in &verification.derived.explained { p { (why) } }
                h2 { "What was checked" }
                pre { (to_text(verification)) }
                h2 { "What happened" }
                (strip::draw(&timeline.ticks))
                (tree::draw(&timeline.processes, begun))
                h2 { "All of it" }
                p { "What the guest said, and nobody saw, is in italics." }
                table {
                    tr { th { "ms" } th { "who" } th { "what" } th { "detail" } }
                    @for moment in &timeline.first { (row(moment, begun)) }
                    @if timeline.left_out > 0 {
                        tr { td colspan="4" { "Not shown here, but in the drawing: " (counted(timeline.left_out, "more event")) "." } }
                    }
                    @for moment in &timeline.last { (row(moment, begun)) }
                }
            }
        }
    };
    Ok(page.into_string())
}

fn row(moment: &Moment, begun: u64) -> maud::Markup {
    let class = match (moment.evidence, moment.what.as_str()) {
        (true, "hotcell.kill" | "hotcell.violation" | "hotcell.fault" | "hotcell.containment_failure") => {
            "kill"
        }
        (true, _) => "saw",
        (false, _) => "said",
    };
    let cut: String = moment.detail.chars().take(MAX_DETAIL).collect();
    let more = if cut.len() < moment.detail.len() { "…" } else { "" };
    html! {
        tr class=(class) {
            td class="n" { (moment.timestamp_ns.saturating_sub(begun) / 1_000_000) }
            td { (moment.actor) }
            td { (moment.what) }
            td class="d" { (cut) (more) }
        }
    }
}
