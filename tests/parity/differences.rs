//! The list of accepted differences with their reasons: `differences.txt`.

/// A line of the list.
struct Known {
    scenario: &'static str,
    start_unready: &'static str,
}

impl Known {
    fn all() -> Vec<Known> {
        let lines = include_str!("differences.txt").lines();
        let entries = lines.filter(|line| !line.starts_with('#') && !line.trim().is_empty());
        entries
            .map(|line| match line.split(" | ").collect::<Vec<_>>()[..] {
                [scenario, start_unready, reason] if !reason.trim().is_empty() => Known {
                    scenario,
                    start_unready: if start_unready == "*" { "" } else { start_unready },
                },
                _ => panic!("differences.txt: {line:?} is not \"scenario | beginning | reason\""),
            })
            .collect()
    }

    fn covers(&self, scenario: &str, difference: &str) -> bool {
        let named = if self.scenario.ends_with('/') {
            scenario.starts_with(self.scenario)
        } else {
            scenario == self.scenario
        };
        named && difference.starts_with(self.start_unready)
    }
}

/// Compares the list with all differences, given as (scenario, difference). Returns an error for each difference that
/// is not listed, and for each line without a difference.
pub(super) fn check(differences: &[(String, String)]) -> Vec<String> {
    let known = Known::all();
    let untold = differences
        .iter()
        .filter(|(scenario, difference)| !known.iter().any(|known| known.covers(scenario, difference)))
        .map(|(scenario, difference)| format!("not listed in tests/parity/differences.txt: {scenario}: {difference}"));
    let idle = known
        .iter()
        .filter(|known| {
            !differences
                .iter()
                .any(|(scenario, difference)| known.covers(scenario, difference))
        })
        .map(|known| {
            let Known {
                scenario,
                start_unready,
            } = known;
            format!("listed in tests/parity/differences.txt, but does not exist: {scenario} {start_unready}")
        });
    untold.chain(idle).collect()
}
