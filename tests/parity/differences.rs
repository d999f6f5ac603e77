//! The list of accepted differences with their reasons: `differences.txt`.

/// A line of the list: an accepted difference of a scenario or a group of scenarios.
struct AcceptedDifference {
    scenario: &'static str,
    prefix: &'static str,
}

impl AcceptedDifference {
    fn all() -> Vec<AcceptedDifference> {
        let lines = include_str!("differences.txt").lines();
        let entries = lines.filter(|line| !line.starts_with('#') && !line.trim().is_empty());
        entries
            .map(|line| match line.split(" | ").collect::<Vec<_>>()[..] {
                [scenario, prefix, reason] if !reason.trim().is_empty() => AcceptedDifference {
                    scenario,
                    prefix: if prefix == "*" { "" } else { prefix },
                },
                _ => panic!("differences.txt: {line:?} is not \"scenario | prefix | reason\""),
            })
            .collect()
    }

    fn covers(&self, scenario: &str, difference: &str) -> bool {
        let named = if self.scenario.ends_with('/') {
            scenario.starts_with(self.scenario)
        } else {
            scenario == self.scenario
        };
        named && difference.starts_with(self.prefix)
    }
}

/// Compares the list with all differences, given as (scenario, difference). Returns an error for each difference that
/// is not listed, and for each line without a difference.
pub(super) fn check(differences: &[(String, String)]) -> Vec<String> {
    let accepted = AcceptedDifference::all();
    let unlisted = differences
        .iter()
        .filter(|(scenario, difference)| !accepted.iter().any(|accepted| accepted.covers(scenario, difference)))
        .map(|(scenario, difference)| format!("not listed in tests/parity/differences.txt: {scenario}: {difference}"));
    let obsolete = accepted
        .iter()
        .filter(|accepted| {
            !differences
                .iter()
                .any(|(scenario, difference)| accepted.covers(scenario, difference))
        })
        .map(|accepted| {
            let AcceptedDifference { scenario, prefix } = accepted;
            format!("listed in tests/parity/differences.txt, but does not exist: {scenario} {prefix}")
        });
    unlisted.chain(obsolete).collect()
}
