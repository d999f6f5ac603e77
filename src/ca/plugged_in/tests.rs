use std::os::unix::fs::symlink;

use super::{
    super::fixture::{ca_bundle, file, files, intermediate, root},
    *,
};

fn bundle() -> BundleFiles {
    let root = root("root", 3650);
    files(&intermediate("ca", 365, &root), &root)
}

fn find_in(files: &BundleFiles) -> BundleLookup {
    find("folder x".into(), files, true)
}

#[test]
fn an_empty_folder_is_absent_and_some_files_are_incomplete() {
    assert!(matches!(find_in(&BundleFiles::new()), BundleLookup::Absent));
    let whole = bundle();
    assert!(matches!(find_in(&whole), BundleLookup::Complete(_)));
    for name in [CERTIFICATE, KEY, CHAIN, ROOTS] {
        let mut files = whole.clone();
        files.remove(name);
        let BundleLookup::Incomplete(error) = find_in(&files) else {
            panic!("without {name} it is incomplete")
        };
        assert_eq!(
            error.to_string(),
            format!("folder x: {name}: incomplete signing CA bundle detected: it is missing")
        );
        let only = BundleFiles::from([(name.into(), whole[name].clone())]);
        let found = find_in(&only);
        let names_the_others = match &found {
            BundleLookup::Incomplete(error) => !error.name.contains(name),
            _ => false,
        };
        assert!(names_the_others, "only {name}: {found:?}");
    }
}

#[test]
fn only_the_chain_may_be_empty() {
    let empty = |names: &[&str]| {
        names
            .iter()
            .map(|name| ((*name).into(), file("")))
            .collect::<BundleFiles>()
    };
    assert!(matches!(
        find_in(&empty(&[CERTIFICATE, KEY, ROOTS, CHAIN, GENERATED_MARKER])),
        BundleLookup::Absent
    ));
    let mut files = bundle();
    files.extend(empty(&[CHAIN]));
    assert!(matches!(find_in(&files), BundleLookup::Complete(_)));
    files.extend(empty(&[KEY]));
    assert!(matches!(find_in(&files), BundleLookup::Incomplete(_)));
}

#[test]
fn cert_manager_bundles_are_found() {
    let (root_name, ca_name) = ("root", "ca");
    let root = root(root_name, 3650);
    let ca = intermediate(ca_name, 365, &root);
    let mut tls: BundleFiles = [
        (TLS_CERTIFICATE, ca.pem()),
        (TLS_KEY, ca.key().serialize_pem()),
        (TLS_ROOTS, root.pem()),
        (CRL, "not looked at".into()),
    ]
    .into_iter()
    .map(|(name, text)| (name.into(), file(text)))
    .collect();
    let found = ca_bundle(&tls);
    assert_eq!(found.certificate.pem, ca.pem().as_bytes());
    assert_eq!(found.roots.pem, root.pem().as_bytes());
    assert_eq!(found.crl, None);
    let chain = crate::ca::certificate::Certificate::all_from_pem(&found.chain.pem).unwrap();
    assert_eq!(chain.len(), 2);
    tls.remove(TLS_ROOTS);
    assert!(matches!(find_in(&tls), BundleLookup::Incomplete(error) if error.name == "ca.crt"));
}

#[test]
fn crls_can_be_disabled() {
    let mut files = bundle();
    files.insert(CRL.into(), file("a list"));
    let crl = |on| match find("x".into(), &files, on) {
        BundleLookup::Complete(bundle) => bundle.crl.is_some(),
        found => panic!("{found:?}"),
    };
    assert!(crl(true) && !crl(false));
}

#[test]
fn a_missing_folder_is_empty_and_an_unreadable_one_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(read(&folder.path().join("none")).unwrap(), BundleFiles::new());
    // A folder in place of a file is unreadable even for root.
    std::fs::create_dir(folder.path().join(KEY)).unwrap();
    let error = read(folder.path()).unwrap_err();
    assert!(error.to_string().contains(KEY), "{error}");
}

#[test]
fn a_mounted_secret_is_read_consistently() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    for (version, text) in [("..one", "1"), ("..two", "2")] {
        std::fs::create_dir(at(version)).unwrap();
        for name in [CERTIFICATE, KEY] {
            std::fs::write(at(version).join(name), text).unwrap();
        }
    }
    symlink("..one", at(DATA)).unwrap();
    for name in [CERTIFICATE, KEY] {
        symlink(format!("..data/{name}"), at(name)).unwrap();
    }
    let texts = || read(folder.path()).unwrap().into_values().collect::<Vec<_>>();
    assert_eq!(texts(), [file("1"), file("1")]);
    symlink("..two", at("..tmp")).unwrap();
    std::fs::rename(at("..tmp"), at(DATA)).unwrap();
    assert_eq!(texts(), [file("2"), file("2")]);
}

#[test]
fn huge_files_are_not_read() {
    let folder = tempfile::tempdir().unwrap();
    let huge = std::fs::File::create(folder.path().join(ROOTS)).unwrap();
    huge.set_len(FILE_BYTES_MAX + 1).unwrap();
    assert!(read(folder.path()).unwrap_err().to_string().contains("longer than"));
}
