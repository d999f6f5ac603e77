//! The pages of ControlZ: tables and forms, without scripts.

use std::fmt::Write as _;

use axum::response::Html;

use super::ScopeInfo;

/// Titles and paths of the pages.
const TOPICS: [(&str, &str); 8] = [
    ("Home", "/"),
    ("Logging Scopes", "/scopez"),
    ("Memory Usage", "/memz/"),
    ("Environment Variables", "/envz/"),
    ("Process Info", "/procz/"),
    ("Command-Line Arguments", "/argz/"),
    ("Version Info", "/versionz/"),
    ("Signals", "/signalz/"),
];

const STYLE: &str = "body{font:16px/1.4 sans-serif;margin:1rem auto;max-width:70rem;padding:0 1rem}\
    nav ul{display:flex;flex-wrap:wrap;gap:.25rem 1rem;list-style:none;padding:0}\
    table{border-collapse:collapse}th,td{text-align:left;padding:.25rem .75rem;border-bottom:1px solid #8888;\
    overflow-wrap:anywhere}:root{color-scheme:light dark}";

/// Levels that a form offers.
const LEVELS: [&str; 5] = ["debug", "info", "warn", "error", "none"];

/// Returns text with the characters escaped that HTML uses.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            other => escaped.push(other),
        }
    }
    escaped
}

fn page(title: &str, content: &str) -> Html<String> {
    let link = |(name, path): &(&str, &str)| {
        let current = if *name == title { " aria-current=\"page\"" } else { "" };
        format!("<li><a href=\"{path}\"{current}>{name}</a></li>")
    };
    let links: String = TOPICS.iter().map(link).collect();
    let title = escaped(title);
    Html(format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" \
         content=\"width=device-width\"><title>{title} - ControlZ</title><style>{STYLE}</style></head><body>\
         <nav aria-label=\"Topics\"><ul>{links}</ul></nav><main><h1>{title}</h1>{content}</main></body></html>\n"
    ))
}

/// Returns a page with a table of names and values.
pub(super) fn table(title: &str, rows: &[(&str, &str)]) -> Html<String> {
    let mut content = String::from("<table><thead><tr><th scope=\"col\">Name</th><th scope=\"col\">Value</th></tr>");
    content.push_str("</thead><tbody>");
    for (name, value) in rows {
        let (name, value) = (escaped(name), escaped(value));
        // Writing into a string does not fail.
        let _ = write!(content, "<tr><th scope=\"row\">{name}</th><td>{value}</td></tr>");
    }
    content.push_str("</tbody></table>");
    page(title, &content)
}

fn choice(form: &str, name: &str, label: &str, chosen: &str) -> String {
    let option = |level: &&str| {
        let selected = if *level == chosen { " selected" } else { "" };
        format!("<option{selected}>{level}</option>")
    };
    let options: String = LEVELS.iter().map(option).collect();
    format!("<select form=\"form-{form}\" name=\"{name}\" aria-label=\"{label} of {form}\">{options}</select>")
}

/// Returns the page with the levels of all scopes, each with a form that changes them.
pub(super) fn scopes(scopes: &[ScopeInfo]) -> Html<String> {
    let mut content = String::from("<table><thead><tr>");
    for column in [
        "Scope",
        "Description",
        "Output level",
        "Stack trace level",
        "Callers",
        "Change",
    ] {
        let _ = write!(content, "<th scope=\"col\">{column}</th>");
    }
    content.push_str("</tr></thead><tbody>");
    for scope in scopes {
        let name = scope.name;
        let checked = if scope.log_callers { " checked" } else { "" };
        let _ = write!(
            content,
            "<tr id=\"{name}\"><th scope=\"row\">{name}</th><td>{}</td><td>{}</td><td>{}</td>\
             <td><input type=\"checkbox\" form=\"form-{name}\" name=\"log_callers\" aria-label=\"Callers of {name}\"\
             {checked}></td><td><form id=\"form-{name}\" method=\"post\" action=\"/scopez/{name}\">\
             <button>Change {name}</button></form></td></tr>",
            escaped(scope.description),
            choice(name, "output_level", "Output level", scope.output_level),
            choice(name, "stack_trace_level", "Stack trace level", scope.stack_trace_level),
        );
    }
    content.push_str("</tbody></table>");
    page("Logging Scopes", &content)
}

/// Returns the page with signals.
pub(super) fn signals() -> Html<String> {
    page(
        "Signals",
        "<form method=\"post\" action=\"/signalj/SIGUSR1\"><button>Send SIGUSR1</button></form>",
    )
}

/// Returns the page for a path without one.
pub(super) fn missing(path: &str) -> Html<String> {
    page("Page not found", &format!("<p>{}</p>", escaped(path)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_escaped() {
        let Html(page) = table("T", &[("A", "<script>\"&")]);
        assert!(page.contains("<td>&lt;script&gt;&quot;&amp;</td>") && !page.contains("<script>"));
    }
}
