//! The charts and the CRDs of the base chart, with the real Helm and a real API server.

mod applied;
mod effects;
mod gateway;
mod installed;
mod istio;
mod names;
mod presets;
mod rendered;
mod rights;
mod stable;

use libtest_mimic::{Failed, Trial};

use crate::support::{project, variable};

/// The CRDs of the base chart.
const DEFINITIONS: &str = "charts/base/files/crd-all.gen.yaml";

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = vec![
        Trial::test("charts::crds_are_current", crds_are_current),
        Trial::test("charts::versions_match_the_binary", versions_match_the_binary),
    ];
    trials.extend(rendered::trials());
    trials.extend(names::trials());
    trials.extend(presets::trials());
    trials.extend(effects::trials());
    trials.extend(gateway::trials());
    trials.extend(istio::trials());
    trials.extend(applied::trials());
    trials.extend(installed::trials());
    trials.extend(rights::trials());
    trials.extend(stable::trials());
    trials
}

/// `UPDATE_GOLDEN=1` regenerates them.
fn crds_are_current() -> Result<(), Failed> {
    let path = project().join(DEFINITIONS);
    let generated = istiod::api::crd::text();
    if variable("UPDATE_GOLDEN").is_some() {
        return Ok(std::fs::write(path, generated)?);
    }
    if std::fs::read_to_string(&path)? == generated {
        return Ok(());
    }
    let path = path.display();
    Err(
        format!("{path} differs from the generated text\nsee: istiod crds | diff {path} -; UPDATE_GOLDEN=1 accepts")
            .into(),
    )
}

fn versions_match_the_binary() -> Result<(), Failed> {
    for chart in names::CHARTS {
        let text = std::fs::read_to_string(project().join("charts").join(chart).join("Chart.yaml"))?;
        let chart = istiod::api::yaml::documents(&text)[0].parse()?;
        assert_eq!(chart["version"], env!("CARGO_PKG_VERSION"));
        assert_eq!(chart["appVersion"], istiod::admin::metrics::ISTIO_VERSION);
    }
    Ok(())
}
