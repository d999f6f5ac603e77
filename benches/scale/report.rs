//! The table of figures.

use crate::support::figures;

/// The figures of all cases.
#[derive(Default)]
pub(crate) struct Report {
    rows: Vec<Row>,
}

struct Row {
    case: String,
    figure: &'static str,
    goal: Option<f64>,
    seen: f64,
}

impl Report {
    /// Adds a figure with a goal, which is an upper bound.
    pub(crate) fn goal(&mut self, case: &str, figure: &'static str, goal: f64, seen: f64) {
        self.add(case, figure, Some(goal), seen);
    }

    /// Adds a figure without a goal.
    pub(crate) fn note(&mut self, case: &str, figure: &'static str, seen: f64) {
        self.add(case, figure, None, seen);
    }

    fn add(&mut self, case: &str, figure: &'static str, goal: Option<f64>, seen: f64) {
        eprintln!("{case}: {figure}: {seen:.3}");
        self.rows.push(Row {
            case: case.to_owned(),
            figure,
            goal,
            seen,
        });
    }

    /// Prints the table and, if `keep` is set, stores the figures; those of other cases stay.
    pub(crate) fn print(&self, keep: bool) -> Result<(), String> {
        let kept = figures::kept("scale");
        println!(
            "on {}; kept figures are from {}\n",
            figures::machine(),
            figures::kept_on("scale")
        );
        println!(
            "{:<58} {:<28} {:>9} {:>10} {:>5} {:>10} {:>6}",
            "case", "figure", "goal", "seen", "met", "kept", "ratio"
        );
        let number = |number: Option<f64>| number.map_or("-".to_owned(), |number| format!("{number:.2}"));
        for row in &self.rows {
            let before = kept[&row.case][row.figure].as_f64();
            let ratio = before.filter(|before| *before > 0.0).map(|before| row.seen / before);
            let met = match row.goal {
                None => "",
                Some(goal) if row.seen <= goal => "yes",
                Some(_) => "no",
            };
            println!(
                "{:<58} {:<28} {:>9} {:>10.2} {met:>5} {:>10} {:>6}",
                row.case,
                row.figure,
                number(row.goal),
                row.seen,
                number(before),
                number(ratio)
            );
        }
        let figure = |row: &Row| figures::Figure {
            goal: row.goal,
            ..figures::Figure::new(&row.case, row.figure, (row.seen * 1000.0).round() / 1000.0)
        };
        let seen: Vec<_> = self.rows.iter().map(figure).collect();
        figures::seen("scale", &seen)?;
        if keep {
            figures::keep_seen("scale", &seen)?;
        }
        Ok(())
    }
}
