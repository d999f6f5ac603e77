//! The difference of two texts in the unified format.

use std::fmt::Write;

/// Lines around a change that are shown.
const CONTEXT: usize = 3;

/// The largest table of the search for common lines. Larger texts are shown as one change.
const MAX_CELLS: usize = 50_000_000;

#[derive(Clone, Copy, PartialEq)]
enum Line<'a> {
    Same(&'a str),
    Removed(&'a str),
    Added(&'a str),
}

/// Returns the difference of two texts; empty if they are equal.
pub(super) fn unified(name: &str, before: &str, after: &str) -> String {
    let lines = compared(&before.lines().collect::<Vec<_>>(), &after.lines().collect::<Vec<_>>());
    let changed: Vec<usize> = (0..lines.len())
        .filter(|index| !matches!(lines[*index], Line::Same(_)))
        .collect();
    let mut text = String::new();
    let mut rest = changed.as_slice();
    while let [first, ..] = rest {
        // Changes whose contexts meet are shown together.
        let meets = |pair: &[usize]| pair[1] - pair[0] <= 2 * CONTEXT + 1;
        let count = 1 + rest.windows(2).take_while(|pair| meets(pair)).count();
        let last = rest[count - 1];
        hunk(
            &mut text,
            &lines,
            first.saturating_sub(CONTEXT),
            (last + CONTEXT + 1).min(lines.len()),
        );
        rest = &rest[count..];
    }
    if text.is_empty() {
        return text;
    }
    format!("--- {name}\n+++ {name} (injected)\n{text}")
}

fn hunk(text: &mut String, lines: &[Line<'_>], start: usize, end: usize) {
    let old = |lines: &[Line<'_>]| lines.iter().filter(|line| !matches!(line, Line::Added(_))).count();
    let new = |lines: &[Line<'_>]| lines.iter().filter(|line| !matches!(line, Line::Removed(_))).count();
    let shown = &lines[start..end];
    let begin = |count: usize, before: usize| if count == 0 { before } else { before + 1 };
    let (old_count, new_count) = (old(shown), new(shown));
    let old_start = begin(old_count, old(&lines[..start]));
    let new_start = begin(new_count, new(&lines[..start]));
    let _ = writeln!(text, "@@ -{old_start},{old_count} +{new_start},{new_count} @@");
    for line in shown {
        let _ = match line {
            Line::Same(line) => writeln!(text, " {line}"),
            Line::Removed(line) => writeln!(text, "-{line}"),
            Line::Added(line) => writeln!(text, "+{line}"),
        };
    }
}

/// Returns the lines of both texts; the longest common subsequence is kept.
fn compared<'a>(before: &[&'a str], after: &[&'a str]) -> Vec<Line<'a>> {
    let start = before.iter().zip(after).take_while(|(a, b)| a == b).count();
    let (left, right) = (&before[start..], &after[start..]);
    let end = left
        .iter()
        .rev()
        .zip(right.iter().rev())
        .take_while(|(a, b)| a == b)
        .count();
    let (left, right) = (&left[..left.len() - end], &right[..right.len() - end]);
    let mut lines: Vec<Line<'a>> = before[..start].iter().map(|line| Line::Same(line)).collect();
    if left.len().saturating_mul(right.len()) > MAX_CELLS {
        lines.extend(left.iter().map(|line| Line::Removed(line)));
        lines.extend(right.iter().map(|line| Line::Added(line)));
    } else {
        lines.extend(common(left, right));
    }
    lines.extend(before[before.len() - end..].iter().map(|line| Line::Same(line)));
    lines
}

fn common<'a>(left: &[&'a str], right: &[&'a str]) -> Vec<Line<'a>> {
    let width = right.len() + 1;
    let mut lengths = vec![0_u32; (left.len() + 1) * width];
    for i in (0..left.len()).rev() {
        for j in (0..right.len()).rev() {
            lengths[i * width + j] = if left[i] == right[j] {
                lengths[(i + 1) * width + j + 1] + 1
            } else {
                lengths[(i + 1) * width + j].max(lengths[i * width + j + 1])
            };
        }
    }
    let (mut i, mut j) = (0, 0);
    let mut lines = Vec::new();
    while i < left.len() || j < right.len() {
        if i < left.len() && j < right.len() && left[i] == right[j] {
            lines.push(Line::Same(left[i]));
            i += 1;
            j += 1;
        } else if j == right.len() || i < left.len() && lengths[(i + 1) * width + j] >= lengths[i * width + j + 1] {
            lines.push(Line::Removed(left[i]));
            i += 1;
        } else {
            lines.push(Line::Added(right[j]));
            j += 1;
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::unified;

    #[test]
    fn changes_have_context() {
        let before = "1\n2\n3\n4\n5\n6\n7\n8\n9\n10\n11\n12\n13\n14\n15\n16\n";
        let after = before.replace("2\n3\n", "2\nnew\n3\n").replace("16\n", "");
        let first = "@@ -1,5 +1,6 @@\n 1\n 2\n+new\n 3\n 4\n 5\n";
        let second = "@@ -13,4 +14,3 @@\n 13\n 14\n 15\n-16\n";
        let expected = format!("--- f\n+++ f (injected)\n{first}{second}");
        assert_eq!(unified("f", before, &after), expected);
        assert_eq!(unified("f", before, before), "");
        assert_eq!(
            unified("f", "", "a\n"),
            "--- f\n+++ f (injected)\n@@ -0,0 +1,1 @@\n+a\n"
        );
    }
}
