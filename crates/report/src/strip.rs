//! The run as a strip: time from left to right, a lane for each kind of event, a line where a rule broke.
//!
//! A drawing without scripts: an inline SVG with a title, a description in words that says what the
//! drawing shows, and no meaning in colour alone. However many events there are, it has at most
//! [`COLUMNS`] marks a lane; a mark's height says how many events lie in its moment.

use hotcell_verify::{Lane, Tick};
use maud::{Markup, html};

/// Moments that the strip tells apart.
const COLUMNS: usize = 240;
/// Lines through all lanes at most.
const MAX_LINES: usize = 24;
/// The drawing's own units.
const LABELS: usize = 110;
const WIDTH: usize = 960;
/// Of one lane.
const HEIGHT: usize = 26;
const TOP: usize = 6;

/// Each with its name, and what one and several events of it are.
const LANES: [(Lane, &str, [&str; 2]); 6] = [
    (Lane::Machine, "machine", ["step of the machine", "steps of the machine"]),
    (
        Lane::Process,
        "processes",
        ["beginning or end of a command or process", "beginnings and ends of commands and processes"],
    ),
    (Lane::File, "files", ["change of a file", "changes of files"]),
    (Lane::Decision, "decisions", ["decision", "decisions"]),
    (Lane::Told, "told", ["statement of the guest", "statements of the guest"]),
    (Lane::Violation, "violations", ["violation, fault or kill", "violations, faults and kills"]),
];

fn said(count: u64, [one, several]: [&str; 2]) -> String {
    format!("{count} {}", if count == 1 { one } else { several })
}

/// Draws it.
pub(crate) fn draw(ticks: &[Tick]) -> Markup {
    let begun = ticks.first().map_or(0, |tick| tick.timestamp_ns);
    let ended = ticks.iter().map(|tick| tick.timestamp_ns).max().unwrap_or(begun);
    let span = ended.saturating_sub(begun).max(1);
    let column = |tick: &Tick| {
        let at =
            u128::from(tick.timestamp_ns.saturating_sub(begun)) * (COLUMNS as u128 - 1) / u128::from(span);
        usize::try_from(at).unwrap_or(0).min(COLUMNS - 1)
    };
    let step = (WIDTH - LABELS) as f64 / COLUMNS as f64;
    let x = |column: usize| LABELS as f64 + column as f64 * step;
    let bottom = TOP + LANES.len() * HEIGHT;
    let seconds = span as f64 / 1e9;
    let mut counts = vec![[0u64; COLUMNS]; LANES.len()];
    for tick in ticks {
        let lane = LANES.iter().position(|(lane, ..)| *lane == tick.lane);
        if let Some(count) = lane.and_then(|lane| counts.get_mut(lane)?.get_mut(column(tick))) {
            *count += 1;
        }
    }
    let total = |lane: usize| counts.get(lane).map_or(0, |counts| counts.iter().sum::<u64>());
    let words: Vec<String> =
        LANES.iter().enumerate().map(|(at, (.., words))| said(total(at), *words)).collect();
    let broken = counts.last().into_iter().flatten().enumerate().filter(|(_, count)| **count > 0);
    let lines: Vec<usize> = broken.map(|(column, _)| column).take(MAX_LINES).collect();
    html! {
        svg class="strip" viewBox={ "0 0 " (WIDTH) " " (bottom + 24) } role="img" aria-labelledby="strip-title strip-words" {
            title id="strip-title" { "The run over " (format!("{seconds:.2}")) " seconds" }
            desc id="strip-words" { (words.join(", ")) "." }
            @for (at, ((_, name, words), counts)) in LANES.iter().zip(&counts).enumerate() {
                text x="0" y=(TOP + at * HEIGHT + HEIGHT - 8) { (name) " (" (total(at)) ")" }
                line class="base" x1=(LABELS) x2=(WIDTH) y1=(TOP + (at + 1) * HEIGHT - 3) y2=(TOP + (at + 1) * HEIGHT - 3);
                @for (column, count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
                    @let tall = height(*count);
                    rect class={ "lane" (at) } x=(format!("{:.1}", x(column))) y=(TOP + (at + 1) * HEIGHT - 3 - tall)
                        width=(format!("{:.1}", step.max(2.5))) height=(tall) {
                        title { (said(*count, *words)) " at " (format!("{:.2} s", seconds * column as f64 / COLUMNS as f64)) }
                    }
                }
            }
            @for column in lines {
                @let at = format!("{:.1}", x(column) + step / 2.0);
                line class="broken" x1=(at) x2=(at) y1=(TOP) y2=(bottom);
            }
            @for quarter in 0..=4 {
                @let at = LABELS + (WIDTH - LABELS) * quarter / 4;
                text class="time" x=(at) y=(bottom + 14) text-anchor=(if quarter == 4 { "end" } else { "start" }) {
                    (format!("{:.2} s", seconds * quarter as f64 / 4.0))
                }
            }
        }
    }
}

/// Of a mark that stands for so many events: twice as many are a little taller.
fn height(count: u64) -> usize {
    let doublings = usize::try_from(64 - count.leading_zeros()).unwrap_or(0);
    (4 + doublings * 2).min(HEIGHT - 6)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tick(ms: u64, lane: Lane) -> Tick {
        Tick { timestamp_ns: 1_000_000_000 + ms * 1_000_000, lane }
    }

    #[test]
    fn the_strip_says_in_words_what_it_draws() {
        let ticks = [
            tick(0, Lane::Machine),
            tick(500, Lane::File),
            tick(500, Lane::File),
            tick(2000, Lane::Violation),
        ];
        let drawn = draw(&ticks).into_string();
        for words in
            ["The run over 2.00 seconds", "2 changes of files", "1 violation, fault or kill", "files (2)"]
        {
            assert!(drawn.contains(words), "{words}: {drawn}");
        }
        assert_eq!(drawn.matches("class=\"broken\"").count(), 1);
        assert!(!drawn.contains("<script") && drawn.contains("role=\"img\""));
    }

    #[test]
    fn a_million_events_are_a_bounded_drawing_and_none_is_one_too() {
        let many: Vec<Tick> = (0..1_000_000).map(|at| tick(at, Lane::File)).collect();
        assert!(draw(&many).into_string().len() < 80_000);
        assert!(draw(&[]).into_string().contains("0 changes of files"));
        let backwards = [tick(50, Lane::Machine), tick(0, Lane::File)];
        assert!(draw(&backwards).into_string().contains("1 change of a file"));
    }
}
