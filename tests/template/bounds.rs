//! Limits: a template that loops, recurses or grows ends with an error that names the limit, and soon.

use std::cell::Cell;
use std::time::Duration;

use istiod::template::{Error, ErrorKind, Exceeded, Host, Limits, NoHost, Templates, Value, sprig_functions};
use libtest_mimic::{Failed, Trial};

use crate::support::wait;

pub(super) fn trials() -> Vec<Trial> {
    vec![
        Trial::test("template::bounds::limits_end_templates", limits_end_templates),
        Trial::test("template::bounds::texts_are_bounded", texts_are_bounded),
        Trial::test("template::bounds::deadline_ends_templates", deadline_ends_templates),
        Trial::test("template::bounds::searches_are_linear", searches_are_linear),
        Trial::test(
            "template::bounds::maps_do_not_contain_themselves",
            maps_do_not_contain_themselves,
        ),
        Trial::test(
            "template::bounds::costly_functions_are_refused",
            costly_functions_are_refused,
        ),
        Trial::test("template::bounds::deep_values_are_freed", deep_values_are_freed),
        Trial::test(
            "template::bounds::renderings_do_not_share_changes",
            renderings_do_not_share_changes,
        ),
    ]
}

/// Limits that a test reaches soon.
fn small() -> Limits {
    Limits {
        source_bytes: 100_000,
        steps: 200_000,
        output_bytes: 100_000,
        value_bytes: 2 << 20,
        ..Limits::default()
    }
}

fn render(text: &str, limits: Limits, host: &dyn Host) -> Result<String, Error> {
    let mut templates = Templates::new(sprig_functions(), limits);
    templates.parse("main", text)?;
    let letters = "x".repeat(1000);
    templates.render("main", &Value::map([("text", Value::string(letters))]), host)
}

/// The limits that templates may exceed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Limit {
    Steps,
    Output,
    Values,
    Depth,
    Calls,
    Nesting,
}

fn limit_of(kind: ErrorKind) -> Option<Limit> {
    match kind {
        ErrorKind::Limit(limit) => match limit {
            Exceeded::Steps(_) => Some(Limit::Steps),
            Exceeded::Output(_) => Some(Limit::Output),
            Exceeded::Values(_) => Some(Limit::Values),
            Exceeded::ValueDepth(_) => Some(Limit::Depth),
            Exceeded::CallDepth(_) => Some(Limit::Calls),
            Exceeded::Nesting(_) => Some(Limit::Nesting),
            Exceeded::Source(_) | Exceeded::ParseDepth(_) | Exceeded::Deadline => None,
        },
        ErrorKind::Parse | ErrorKind::Execute => None,
    }
}

/// Templates, each with the limits of which it exceeds one.
const HOSTILE: &[(&str, &[Limit])] = &[
    // Loops.
    ("{{range 1000000000000}}{{end}}", &[Limit::Steps]),
    (
        "{{range $i := 1000000}}{{range $j := 1000000}}{{end}}{{end}}",
        &[Limit::Steps],
    ),
    ("{{range 1000000}}{{continue}}{{end}}", &[Limit::Steps]),
    ("{{range 1000000000}}output{{end}}", &[Limit::Output, Limit::Steps]),
    // Recursion.
    (
        r#"{{define "a"}}{{template "a" .}}{{end}}{{template "a" .}}"#,
        &[Limit::Calls],
    ),
    (
        r#"{{define "a"}}{{template "b"}}{{end}}{{define "b"}}{{template "a"}}{{end}}{{template "a"}}"#,
        &[Limit::Calls],
    ),
    (
        r#"{{define "a"}}{{if 1}}{{if 1}}{{if 1}}{{with 1}}{{template "a" .}}{{end}}{{end}}{{end}}{{end}}{{end}}{{template "a" .}}"#,
        &[Limit::Nesting, Limit::Calls],
    ),
    (
        r#"{{define "a"}}{{template "b" .}}{{template "b" .}}{{end}}{{define "b"}}{{range 50}}{{template "c" .}}{{end}}{{end}}{{define "c"}}{{range 100000}}{{end}}{{end}}{{template "a" .}}"#,
        &[Limit::Steps],
    ),
    // Growth of strings.
    (
        r#"{{$x := "x"}}{{range 100}}{{$x = print $x $x}}{{end}}"#,
        &[Limit::Values],
    ),
    (
        r#"{{$x := "x"}}{{range 100}}{{$x = printf "%s%s" $x $x}}{{end}}"#,
        &[Limit::Values],
    ),
    (
        r#"{{$x := "x"}}{{range 100}}{{$x = join $x (list $x $x $x)}}{{end}}"#,
        &[Limit::Values],
    ),
    (
        r#"{{$x := "x"}}{{range 100}}{{$x = replace "x" "xx" $x}}{{end}}"#,
        &[Limit::Values],
    ),
    (
        r#"{{$x := "x"}}{{range 100}}{{$x = quote $x $x}}{{end}}"#,
        &[Limit::Values],
    ),
    (
        r#"{{$x := "x"}}{{range 100}}{{$x = cat $x $x}}{{end}}"#,
        &[Limit::Values],
    ),
    (
        r#"{{$x := "x"}}{{range 100}}{{$x = toJson (list $x $x)}}{{end}}"#,
        &[Limit::Values],
    ),
    (
        r#"{{$x := "\""}}{{range 100}}{{$x = quote $x}}{{end}}"#,
        &[Limit::Values],
    ),
    (
        r#"{{$x := "x"}}{{range 100}}{{$x = regexReplaceAll "x" $x "$0$0"}}{{end}}"#,
        &[Limit::Values, Limit::Steps],
    ),
    (
        r#"{{$x := "x"}}{{range 100}}{{$x = html $x $x}}{{end}}"#,
        &[Limit::Values],
    ),
    (
        r#"{{$x := "xx"}}{{range 100}}{{$x = wrapWith 1 $x $x}}{{end}}"#,
        &[Limit::Values, Limit::Steps],
    ),
    (
        r#"{{$x := "x"}}{{range 100}}{{$x = b64enc $x}}{{end}}"#,
        &[Limit::Values],
    ),
    (r"{{range 100000}}{{$.text}}{{end}}", &[Limit::Output]),
    (
        r"{{range 100000}}{{$x := upper $.text}}{{end}}",
        &[Limit::Values, Limit::Steps],
    ),
    (r#"{{repeat 1000000000 "abc"}}"#, &[Limit::Values]),
    (r#"{{repeat 9223372036854775807 "abc"}}"#, &[Limit::Values]),
    (r#"{{indent 1000000000 "a\nb"}}"#, &[Limit::Values]),
    (r#"{{nindent 100000 (repeat 100 "a\n")}}"#, &[Limit::Values]),
    (r#"{{$x := repeat 1000 "\n"}}{{indent 100000 $x}}"#, &[Limit::Values]),
    (r#"{{printf "%1000000d%1000000d%1000000d" 1 1 1}}"#, &[Limit::Values]),
    (
        r#"{{printf "%.1000000f%.1000000f%.1000000f" 1.5 1.5 1.5}}"#,
        &[Limit::Values],
    ),
    (
        r#"{{printf "%*d%*d%*d" 1000000 1 1000000 1 1000000 1}}"#,
        &[Limit::Values],
    ),
    (
        r#"{{printf "%01000000d%01000000s%.1000000d" 1 "a" 1}}"#,
        &[Limit::Values],
    ),
    (r#"{{printf "%1000000U%1000000q%1000000c" 65 65 65}}"#, &[Limit::Values]),
    // Growth of lists.
    ("{{until 1000000000}}", &[Limit::Values, Limit::Steps]),
    ("{{untilStep 0 9223372036854775807 1}}", &[Limit::Values, Limit::Steps]),
    (
        "{{untilStep -9223372036854775808 9223372036854775807 2}}",
        &[Limit::Values, Limit::Steps],
    ),
    ("{{seq 1 1000000000}}", &[Limit::Values, Limit::Steps]),
    ("{{seq 9223372036854775806}}", &[Limit::Values, Limit::Steps]),
    (
        "{{$l := list 1}}{{range 100}}{{$l = concat $l $l}}{{end}}",
        &[Limit::Values, Limit::Steps],
    ),
    (
        "{{$l := list}}{{range 100000}}{{$l = append $l 1}}{{end}}",
        &[Limit::Values, Limit::Steps],
    ),
    ("{{$l := until 10000}}{{uniq $l}}", &[Limit::Values, Limit::Steps]),
    (
        "{{$l := until 1000}}{{range 1000}}{{$m := without $l -1}}{{end}}",
        &[Limit::Values, Limit::Steps],
    ),
    (
        r"{{$d := dict}}{{range $i := 1000000}}{{$_ := set $d (print $i) $i}}{{end}}",
        &[Limit::Values, Limit::Steps],
    ),
    (
        r#"{{splitList "" (repeat 1000000 "x")}}"#,
        &[Limit::Values, Limit::Steps],
    ),
    (r#"{{range 100}}{{$x := split "x" $.text}}{{end}}"#, &[Limit::Values]),
    (
        r#"{{range 100}}{{$x := regexFindAll "x" $.text -1}}{{end}}"#,
        &[Limit::Values],
    ),
    // Values that are small in memory and large in text.
    (
        "{{$l := list 1}}{{range 100}}{{$l = list $l $l}}{{end}}{{$l}}",
        &[Limit::Steps, Limit::Values],
    ),
    (
        "{{$l := list 1}}{{range 100}}{{$l = list $l $l}}{{end}}{{toJson $l}}",
        &[Limit::Steps, Limit::Values],
    ),
    (
        "{{$l := list 1}}{{range 100}}{{$l = list $l $l}}{{end}}{{deepCopy $l}}",
        &[Limit::Steps, Limit::Values],
    ),
    (
        "{{$l := list 1}}{{$m := list 1}}{{range 100}}{{$l = list $l $l}}{{$m = list $m $m}}{{end}}{{deepEqual $l $m}}",
        &[Limit::Steps],
    ),
    (
        r#"{{$d := dict}}{{range 100}}{{$d = dict "a" $d "b" $d}}{{end}}{{set (dict) "x" $d}}"#,
        &[Limit::Steps],
    ),
    // Depth of values.
    (
        "{{$l := list}}{{range 1000}}{{$l = list $l}}{{end}}{{$l}}",
        &[Limit::Depth],
    ),
    (
        "{{$l := list}}{{range 1000}}{{$l = list $l}}{{end}}{{toJson $l}}",
        &[Limit::Depth],
    ),
    (
        "{{$l := list}}{{range 1000}}{{$l = list $l}}{{end}}{{printf \"%v\" $l}}",
        &[Limit::Depth],
    ),
    (
        "{{$l := list}}{{range 1000}}{{$l = list $l}}{{end}}{{deepCopy $l}}",
        &[Limit::Depth],
    ),
    (
        r#"{{$d := dict}}{{range 1000}}{{$d = dict "a" $d}}{{end}}{{merge (dict) $d (deepCopy $d)}}"#,
        &[Limit::Depth],
    ),
    (r#"{{fromJson (repeat 1000 "[")}}"#, &[Limit::Depth]),
    (r#"{{mustFromJson (repeat 1000 "{\"a\":")}}"#, &[Limit::Depth]),
    // Slow functions.
    (
        r#"{{range 1000}}{{regexMatch (printf "a%d" .) "a"}}{{end}}"#,
        &[Limit::Steps],
    ),
    (
        r#"{{range 1000}}{{regexMatch "(x+x+)+y" $.text}}{{end}}"#,
        &[Limit::Steps],
    ),
    (
        r"{{$x := list}}{{range 1000}}{{$x = append $x 1.1}}{{end}}{{range 1000}}{{mulf 1.1 1.1}}{{end}}{{range 100000}}{{mulf 1.1 1.1 1.1}}{{end}}",
        &[Limit::Steps, Limit::Values],
    ),
    (
        r"{{range 100000}}{{sha512sum $.text}}{{end}}",
        &[Limit::Steps, Limit::Values, Limit::Output],
    ),
    (r"{{range 100000}}{{eq $.text $.text}}{{end}}", &[Limit::Steps]),
];

fn limits_end_templates() -> Result<(), Failed> {
    let mut wrong = Vec::new();
    for (text, limits) in HOSTILE {
        let started_at = wait::now();
        let outcome = render(text, small(), &NoHost);
        let elapsed = started_at.elapsed();
        match &outcome {
            Err(error) if limit_of(error.kind).is_some_and(|limit| limits.contains(&limit)) => {}
            outcome => {
                let mut shown = format!("{outcome:?}");
                shown.truncate(300);
                wrong.push(format!("{text}\n  want {limits:?}, got {shown}"));
            }
        }
        if elapsed > Duration::from_secs(20) {
            wrong.push(format!("{text}\n  took {elapsed:?}"));
        }
    }
    if wrong.is_empty() {
        Ok(())
    } else {
        Err(wrong.join("\n").into())
    }
}

fn texts_are_bounded() -> Result<(), Failed> {
    let nested = |open: &str, close: &str| format!("{}x{}", open.repeat(3000), close.repeat(3000));
    let deep = [
        nested("{{if 1}}", "{{end}}"),
        nested("{{range 1}}", "{{end}}"),
        format!("{{{{{}1{}}}}}", "(".repeat(3000), ")".repeat(3000)),
        format!("{{{{if 0}}}}{}{{{{end}}}}", "{{else if 0}}".repeat(3000)),
        nested(r#"{{block "x" .}}"#, "{{end}}"),
        "(((".repeat(3000),
    ];
    for text in &deep[..5] {
        let error = render(text, small(), &NoHost).expect_err("the text is too deep");
        if !matches!(error.kind, ErrorKind::Limit(Exceeded::ParseDepth(_))) {
            return Err(format!("{error}").into());
        }
    }
    let error = render(&"x".repeat(100_001), small(), &NoHost).expect_err("the text is too long");
    assert_eq!(error.kind, ErrorKind::Limit(Exceeded::Source(100_000)));
    assert_eq!(error.message, "template: main: the template has more than 100000 bytes");
    assert!(render(&"x".repeat(100_000), small(), &NoHost).is_ok());
    Ok(())
}

/// A host whose time is over after a number of checks.
struct Impatient(Cell<u32>);

impl Host for Impatient {
    fn is_expired(&self) -> bool {
        let left = self.0.get();
        self.0.set(left.saturating_sub(1));
        left == 0
    }
}

fn deadline_ends_templates() -> Result<(), Failed> {
    let host = Impatient(Cell::new(3));
    let error = render("a\n{{range 1000000000}}{{end}}", Limits::default(), &host);
    let error = error.expect_err("the loop is long");
    assert_eq!(error.kind, ErrorKind::Limit(Exceeded::Deadline));
    assert_eq!((error.template.as_str(), error.line), ("main", 2));
    let text = "template: main:2:8: executing \"main\" at <1000000000>: rendering takes too long";
    assert_eq!(error.message, text);
    Ok(())
}

/// Each try of a plain search would compare millions of equal bytes before the last one differs.
fn searches_are_linear() -> Result<(), Failed> {
    let text = r#"{{$part := print (repeat 4000000 "a") "b"}}{{$whole := repeat 8000000 "a"}}{{contains $part $whole}} {{replace $part "" $whole | len}}"#;
    let started_at = wait::now();
    assert_eq!(render(text, Limits::default(), &NoHost)?, "false 8000000");
    let elapsed = started_at.elapsed();
    assert!(elapsed < Duration::from_secs(20), "{elapsed:?}");
    Ok(())
}

fn maps_do_not_contain_themselves() -> Result<(), Failed> {
    for text in [
        r#"{{$d := dict}}{{set $d "a" $d}}"#,
        r#"{{$d := dict}}{{set $d "a" (list 1 (dict "b" $d))}}"#,
        r#"{{$d := dict}}{{$e := dict "d" $d}}{{merge $d (dict "e" $e)}}"#,
    ] {
        let error = render(text, small(), &NoHost).expect_err("the map would contain itself");
        assert!(error.message.ends_with(": a map cannot contain itself"), "{error}");
    }
    Ok(())
}

fn costly_functions_are_refused() -> Result<(), Failed> {
    for text in [r#"{{genCA "a" 1}}"#, r#"{{bcrypt "a"}}"#, r#"{{getHostByName "a"}}"#] {
        let error = render(text, small(), &NoHost).expect_err("the function is refused");
        assert!(error.message.ends_with(": the function is not supported"), "{error}");
    }
    let large =
        r#"{{regexMatch "((a{1,100}){1,100}){1,100}" "a"}} {{mustRegexMatch "((a{1,100}){1,100}){1,100}" "a"}}"#;
    let error = render(large, small(), &NoHost).expect_err("the expression is too large");
    assert!(error.message.contains("expression too large"), "{error}");
    Ok(())
}

fn deep_values_are_freed() -> Result<(), Failed> {
    let text = r#"{{$l := list}}{{range 100000}}{{$l = list $l}}{{end}}{{$d := dict}}{{range 100000}}{{$d = dict "a" $d}}{{end}}ok"#;
    assert_eq!(render(text, Limits::default(), &NoHost).expect("it renders"), "ok");
    Ok(())
}

fn renderings_do_not_share_changes() -> Result<(), Failed> {
    let mut templates = Templates::new(sprig_functions(), Limits::default());
    templates.parse("main", r#"{{.in.a}}{{$_ := set .in "a" 2}}{{.in.a}}"#)?;
    let data = Value::map([("in", Value::map([("a", Value::int(1))]))]);
    for _ in 0..2 {
        assert_eq!(templates.render("main", &data, &NoHost)?, "12");
    }
    Ok(())
}
