//! Templates: the outputs and errors of Go for every case in `template/cases`, and limits.
//!
//! A small Go program (`template/main.go`) renders the cases with text/template and sprig. Its results are kept in
//! `template/expected.json`; where Go is installed, a test renders them again. After an edit of the cases:
//!
//!     go run -C tests/template . cases > tests/template/expected.json

mod bounds;
mod cases;
mod data;

use libtest_mimic::Trial;

/// The tests of this module.
pub(crate) fn trials() -> Vec<Trial> {
    [cases::trials(), bounds::trials()].into_iter().flatten().collect()
}
