//! Panics while objects are parsed or written. Such a panic is a bug, but one object or file must not end what works
//! for all others.

use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
};

use crate::{
    api::{Diagnostic, FieldError, Kind, Severity, document::ParsedDocument, folder::FileContent},
    base::ObjectKey,
};

/// The problem of what a parser panics on.
const MESSAGE: &str = "reading it failed; this is a bug in istiod";

/// Parses an object. One that its parser panics on does not apply.
pub(super) fn parsed(kind: Kind, key: &ObjectKey, parse: impl FnOnce() -> ParsedDocument) -> ParsedDocument {
    catch_unwind(AssertUnwindSafe(parse)).unwrap_or_else(|_| {
        let finding = FieldError {
            field: String::new(),
            message: MESSAGE.to_owned(),
        };
        ParsedDocument {
            rejected: vec![(kind, key.clone())],
            diagnostics: vec![Diagnostic::of_object(
                kind,
                key.clone(),
                Severity::Error,
                "Defect",
                finding,
            )],
            ..ParsedDocument::default()
        }
    })
}

/// Reads a file. One that its parser panics on cannot be read.
pub(super) fn file(name: &str, read: impl FnOnce() -> FileContent) -> FileContent {
    catch_unwind(AssertUnwindSafe(read)).unwrap_or_else(|_| FileContent::absent(name, MESSAGE))
}

/// Writes a file. A panic is an error like others.
pub(super) fn written<T>(write: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let failed = |_| Err(io::Error::other("writing it failed; this is a bug in istiod"));
    catch_unwind(AssertUnwindSafe(write)).unwrap_or_else(failed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ClusterId;

    #[test]
    fn an_object_with_a_defect_does_not_apply() {
        let key = ObjectKey::new(&ClusterId::new_static("c"), "shop", "a");
        let parsed = parsed(Kind::Sidecar, &key, || panic!("on purpose"));
        assert!(parsed.rows.is_empty());
        assert_eq!(parsed.rejected, [(Kind::Sidecar, key)]);
        assert_eq!(parsed.diagnostics.len(), 1);
    }

    #[test]
    fn a_file_with_a_defect_keeps_its_last_content() {
        const TEXT: &str = "apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec: {ports: [{port: 80}]}\n";
        let cluster = ClusterId::new_static("c");
        let known = file("a.yaml", || FileContent::read("a.yaml", TEXT.as_bytes(), &cluster));
        assert_eq!(known.objects.len(), 1);
        let after = file("a.yaml", || panic!("on purpose")).after(&known);
        assert_eq!(after.objects, known.objects);
        assert_eq!(after.diagnostics.len(), 1);
    }

    #[test]
    fn a_panic_while_a_file_is_written_is_an_error() {
        assert!(written(|| -> io::Result<u64> { panic!("on purpose") }).is_err());
        assert_eq!(written(|| Ok(7)).ok(), Some(7));
    }
}
