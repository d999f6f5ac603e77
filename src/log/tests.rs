use std::{
    path::Path,
    time::{Duration, SystemTime},
};

use serde_json::{Value, json};
use tracing_subscriber::layer::SubscriberExt;

use super::{layer::MAX_TEXT, levels::Level, scope::ScopeState, *};

fn noon() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000)
}

fn options(target: &Path, levels: &str) -> Options {
    Options {
        output_levels: levels.into(),
        stack_trace_levels: "default:error".into(),
        callers: "model".into(),
        targets: vec![target.to_str().expect("a text").into()],
        rotated: None,
        encoding: Encoding::Json,
        clock: noon,
    }
}

/// Returns the lines of what `act` logs.
fn logged(levels: &str, act: impl FnOnce(&Scopes)) -> Vec<Value> {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("log");
    let (logging, layer) = Logging::prepared(&options(&file, levels)).expect("valid options");
    tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || act(&logging.scopes));
    drop(logging);
    let text = std::fs::read_to_string(&file).expect("the file");
    text.lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect()
}

#[test]
fn events_become_lines_of_their_scope() {
    let lines = logged("info", |_| {
        tracing::info!(target: "istiod::xds::stream", r#type = "CDS", size = 3, open = true, "sent response");
        tracing::debug!(target: "istiod::xds::stream", "received request");
        tracing::error!(target: "kube_client::client", "failed");
        tracing::info!(target: "istiod::model::world", reason = %"two words", "committed");
        tracing::error!(target: "istiod::app", "ended");
    });
    let mut lines = lines.into_iter();
    assert_eq!(
        lines.next(),
        Some(
            json!({"level": "info", "time": "2023-11-14T22:13:20.000000Z", "scope": "ads", "msg": "sent response",
            "type": "CDS", "size": 3, "open": true})
        )
    );
    let committed = lines.next().expect("a line");
    assert_eq!(
        (&committed["scope"], &committed["reason"]),
        (&json!("model"), &json!("two words"))
    );
    let caller = committed["caller"].as_str().expect("a caller");
    assert!(caller.starts_with("log/tests.rs:"), "{caller}");
    let ended = lines.next().expect("a line");
    assert_eq!((&ended["msg"], ended.get("scope")), (&json!("ended"), None));
    assert!(
        ended["stack"]
            .as_str()
            .is_some_and(|stack| stack.contains("events_become_lines_of_their_scope"))
    );
    assert_eq!(lines.next(), None);
}

#[test]
fn long_texts_are_cut_between_characters() {
    let long = format!("a{}", "é".repeat(MAX_TEXT));
    let lines = logged("info", |_| {
        tracing::info!(target: "istiod::app", node = long.as_str(), reason = %long, "{long}");
    });
    for field in ["node", "reason", "msg"] {
        let text = lines[0][field].as_str().expect("a text");
        let kept = text.strip_suffix('…').expect("a mark");
        assert!(long.starts_with(kept) && kept.len() == MAX_TEXT - 1, "{field}");
    }
}

#[test]
fn levels_change_at_run_time() {
    let say = |text: &'static str| tracing::debug!(target: "istiod::xds::delta", "{text}");
    let lines = logged("info", |scopes| {
        let delta = Scopes::named("delta").expect("a scope");
        let set = |output| {
            let state = scopes.state(delta);
            scopes.set(delta, ScopeState { output, ..state });
        };
        say("one");
        set(Level::Debug);
        say("two");
        set(Level::None);
        say("three");
    });
    let messages: Vec<&Value> = lines.iter().map(|line| &line["msg"]).collect();
    assert_eq!(messages, ["two"]);
}

#[test]
fn repeated_warnings_are_summarized() {
    let lines = logged("info", |_| {
        for _ in 0..5 {
            tracing::warn!(error = "too many open files", "failed to accept connection");
        }
    });
    assert_eq!(lines.len(), 2);
    assert_eq!(
        (&lines[0]["msg"], &lines[0]["repeated"]),
        (&lines[1]["msg"], &Value::Null)
    );
    assert_eq!(
        (&lines[1]["repeated"], &lines[1]["error"]),
        (&json!(4), &json!("too many open files"))
    );
}
