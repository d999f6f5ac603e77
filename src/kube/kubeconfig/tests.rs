use serde_json::json;

use super::*;

fn kubeconfig(user: &Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "there",
        "clusters": [{ "name": "c1", "cluster": { "server": "https://192.0.2.1:6443" } }],
        "contexts": [{ "name": "there", "context": { "cluster": "c1", "user": "u" } }],
        "users": [{ "name": "u", "user": user }],
    })
}

fn check(user: &Value, allowed: &[&str]) -> Result<CheckedKubeconfig, String> {
    let allowed = allowed.iter().map(|name| (*name).to_owned()).collect();
    CheckedKubeconfig::of(kubeconfig(user), &allowed).map_err(|error| error.to_string())
}

#[test]
fn kubeconfigs_with_files_or_programs_are_refused() {
    let cases = [
        (json!({ "client-key": "/k" }), "clientKey is not allowed", "clientKey"),
        (
            json!({ "client-certificate": "/c" }),
            "clientCertificate is not allowed",
            "clientCertificate",
        ),
        (
            json!({ "tokenFile": "/var/run/secrets/token" }),
            "tokenFile is not allowed",
            "tokenFile",
        ),
        (json!({ "exec": { "command": "sh" } }), "exec is not allowed", "exec"),
        (json!({ "exec": {} }), "exec is not allowed", "exec"),
        (
            json!({ "auth-provider": { "name": "gcp", "config": { "cmd-path": "sh" } } }),
            "auth provider gcp is not allowed",
            "gcp",
        ),
    ];
    for (user, message, name) in cases {
        let error = check(&user, &[]).expect_err("refused");
        assert!(
            error.contains(message) && error.contains("hint: PILOT_INSECURE"),
            "{error}"
        );
        assert!(check(&user, &["other"]).is_err());
        check(&user, &[name]).expect("allowed by name");
    }
}

#[test]
fn every_user_is_checked_and_not_only_the_one_in_use() {
    let mut config = kubeconfig(&json!({ "token": "t" }));
    let other = json!({ "name": "unused", "user": { "exec": { "command": "sh" } } });
    config["users"].as_array_mut().expect("a list").push(other);
    assert!(CheckedKubeconfig::of(config, &BTreeSet::new()).is_err());
}

#[tokio::test]
async fn inline_credentials_pass() {
    let users = [
        json!({}),
        json!({ "token": "t" }),
        json!({ "username": "a", "password": "b" }),
        json!({ "token": "t", "as": "someone", "as-groups": ["g"], "as-user-extra": { "k": ["v"] } }),
        json!({ "client-certificate-data": "YQ==", "client-key-data": "YQ==" }),
        json!({ "auth-provider": { "name": "oidc", "config": { "id-token": "t" } } }),
        json!({ "token": "t", "tokenFile": "", "client-key": "", "client-certificate": "", "exec": null }),
    ];
    for user in users {
        let checked = check(&user, &[]).expect("inline credentials are allowed");
        let config = checked.client_config().await.expect("a client's configuration");
        assert_eq!(config.cluster_url.host(), Some("192.0.2.1"));
        assert_eq!(checked.cluster(), ClusterId::new("c1"));
    }
}

#[test]
fn contexts_must_refer_to_existing_entries() {
    let good = kubeconfig(&json!({ "token": "t" }));
    let with = |path: &str, value: Value| {
        let mut config = good.clone();
        *config.pointer_mut(path).expect("the path exists") = value;
        CheckedKubeconfig::of(config, &BTreeSet::new()).map_err(|error| error.to_string())
    };
    let cases = [
        ("/current-context", json!(""), "no current-context"),
        ("/current-context", Value::Null, "no current-context"),
        ("/current-context", json!("elsewhere"), "not one of the contexts"),
        ("/contexts/0/context/cluster", json!("c2"), "not one of the clusters"),
        ("/contexts/0/context/user", json!("v"), "not one of the users"),
        ("/clusters/0/cluster/server", json!(""), "has no server"),
        ("/clusters/0/cluster", Value::Null, "not one of the clusters"),
        ("/users/0/user/token", json!(5), "users[0].user.token"),
        ("/users", json!("x"), "users"),
        ("/users", json!([{ "name": "u" }, { "name": "u" }]), "two users"),
        ("", json!("text"), "valid"),
        ("", Value::Null, "empty"),
    ];
    for (path, value, part) in cases {
        let error = with(path, value).expect_err("refused");
        assert!(error.contains(part), "{path}: {error}");
    }
}

#[tokio::test]
async fn messages_and_debug_show_no_content() {
    const SECRET: &str = "c2VjcmV0LXNlY3JldC1zZWNyZXQ";
    let users = [
        json!({ "token": [SECRET] }),
        json!({ "exec": { "command": SECRET } }),
        json!({ "password": { "x": SECRET } }),
    ];
    for user in users {
        let error = check(&user, &[]).expect_err("refused");
        assert!(!error.contains(&SECRET[..6]), "{error}");
    }
    let mut config = kubeconfig(&json!({ "token": SECRET }));
    config["clusters"][0]["cluster"]["certificate-authority-data"] = json!(format!("{SECRET}%"));
    let checked = CheckedKubeconfig::of(config, &BTreeSet::new()).expect("the form is right");
    let error = checked.client_config().await.expect_err("no base64");
    let printed = format!("{error} {error:?} {checked:?}");
    assert!(error.to_string().contains("certificate authority"), "{error}");
    assert!(!printed.contains(&SECRET[..6]), "{printed}");
}

#[tokio::test]
async fn only_the_proxy_of_the_kubeconfig_is_used() {
    let mut config = kubeconfig(&json!({ "token": "t" }));
    let checked = CheckedKubeconfig::of(config.clone(), &BTreeSet::new()).expect("an allowed kubeconfig");
    assert_eq!(
        checked.client_config().await.expect("a client configuration").proxy_url,
        None
    );
    config["clusters"][0]["cluster"]["proxy-url"] = json!("http://192.0.2.9:3128");
    let checked = CheckedKubeconfig::of(config, &BTreeSet::new()).expect("proxies are not checked");
    let proxy = checked.client_config().await.expect("a client configuration").proxy_url;
    assert_eq!(proxy.and_then(|url| url.port_u16()), Some(3128));
}
