//! The page at `/`: the state of the mesh for people. It is static and works offline. It shows the debug pages, and has
//! their access rules.

use axum::{
    Router,
    http::header,
    response::{IntoResponse, Response},
    routing::get,
};

use super::access::{Access, Readers};

/// Nothing is loaded from elsewhere, and no script or style is inline.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
                      img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// A file of the page: its path, its content type and its text.
const FILES: [(&str, &str, &str); 3] = [
    ("/", "text/html; charset=utf-8", include_str!("page/index.html")),
    (
        "/page/style.css",
        "text/css; charset=utf-8",
        include_str!("page/style.css"),
    ),
    (
        "/page/script.js",
        "text/javascript; charset=utf-8",
        include_str!("page/script.js"),
    ),
];

/// Returns the page with these access rules.
pub fn guarded_page(access: &Access) -> Router {
    let router = FILES
        .into_iter()
        .fold(Router::new(), |router, (path, content_type, text)| {
            router.route(path, get(move || std::future::ready(file(content_type, text))))
        });
    access.guard(router, |_| Readers::ControlPlane)
}

fn file(content_type: &'static str, text: &'static str) -> Response {
    let headers = [
        (header::CONTENT_TYPE, content_type),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, text).into_response()
}
