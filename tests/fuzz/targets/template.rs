//! Templates, which tenants may write.

use istiod::template::{ErrorKind, Limits, NoHost, Templates, Value, sprig_functions};

use super::{Target, class_of, parts};

/// A template and its data as JSON, separated by a zero byte.
pub(super) const TEMPLATE: Target = Target {
    name: "template",
    run: template,
    words: &[
        b"{{",
        b"}}",
        b"{{- ",
        b" -}}",
        b"{{end}}",
        b"{{else}}",
        b"{{if ",
        b"{{range $i, $e := .}}",
        b"{{with ",
        b"{{define \"t\"}}",
        b"{{template \"t\" .}}",
        b"{{block \"b\" .}}",
        b"{{break}}",
        b"{{continue}}",
        b"{{$x := ",
        b"{{$x = ",
        b" | ",
        b"(index . 0)",
        b"/*",
        b"*/",
        b"`",
        b"'\\",
        b"0x1p-",
        b"1e308",
        b"-9223372036854775808",
        b"nil",
        b"printf \"%",
        b"%[2]*.*d",
        b"%+#010.3v",
        b"slice . 1 2",
        b"until 9",
        b"untilStep ",
        b"seq ",
        b"repeat 9 ",
        b"substr ",
        b"trunc -",
        b"abbrevboth 5 9 ",
        b"wrapWith 3 \"\" ",
        b"snakecase ",
        b"camelcase ",
        b"regexReplaceAll \"",
        b"regexSplit \"\" ",
        b"semverCompare \">=1.x || ~2\" ",
        b"urlParse \"",
        b"urlJoin (dict ",
        b"b64dec ",
        b"b32dec ",
        b"toDate \"2006-01-02\" ",
        b"date \"Jan _2 15:04:05.000 Z07:00\" ",
        b"durationRound ",
        b"dateModify ",
        b"set $x \"a\" ",
        b"merge $x ",
        b"dig \"a\" \"b\" ",
        b"chunk 2 ",
        b"divf ",
        b"round 1.5 ",
        b"toPrettyJson ",
        b"mustFromJson ",
        b"deepEqual ",
    ],
};

/// Limits that an input reaches within a second, also in a build without optimisation.
fn limits() -> Limits {
    Limits {
        steps: 20_000,
        output_bytes: 1 << 16,
        value_bytes: 1 << 20,
        ..Limits::default()
    }
}

fn template(bytes: &[u8]) -> u64 {
    let [text, data] = parts::<2>(bytes);
    let text = String::from_utf8_lossy(text);
    let mut templates = Templates::new(sprig_functions(), limits());
    if let Err(error) = templates.parse("main", &text) {
        return class_of(&error.message);
    }
    let data = serde_json::from_slice(data).unwrap_or_default();
    match templates.render("main", &Value::from_json(&data), &NoHost) {
        Ok(output) => {
            assert!(output.len() <= 3 << 16, "invalid bytes become three");
            u64::from(output.len().min(64) as u32)
        }
        Err(error) => {
            assert_ne!(error.kind, ErrorKind::Parse, "the text was parsed before");
            assert!(error.message.starts_with("template: "), "{error}");
            // The place and the context differ in every input; the reason is behind them.
            class_of(error.message.rsplit(">: ").next().unwrap_or_default())
        }
    }
}
