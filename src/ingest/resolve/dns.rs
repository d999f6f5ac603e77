//! Lookups at the system's DNS servers.

use std::{
    io,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures::future::BoxFuture;
use hickory_resolver::{
    TokioResolver,
    config::{ResolveHosts, ResolverOpts},
    lookup::Lookup as Records,
    net::{NetError, runtime::TokioRuntimeProvider},
    proto::rr::{RData, RecordType},
    system_conf::parse_resolv_conf,
};
use smol_str::SmolStr;
use tokio::time::timeout;

use super::{Answer, Lookup, LookupError};

/// Longest time of a lookup: endpoints wait for the first one. Shorter than the wait at the start.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Longest time until a query is repeated.
const LONGEST_REPEAT: Duration = Duration::from_secs(2);

/// Configuration of the system's DNS servers.
const RESOLV_CONF: &str = "/etc/resolv.conf";

/// Servers of `/etc/resolv.conf`, which is read again for each lookup: a node's servers may change. The last usable
/// content stays.
#[derive(Default)]
pub(super) struct SystemDns {
    /// A lock instead of a message: it is held for a comparison, or while a new content is parsed.
    servers: Mutex<Servers>,
}

#[derive(Default)]
struct Servers {
    /// The last content, which may not be usable; `None` if it could not be read.
    content: Option<Vec<u8>>,
    /// Queries the servers of the last usable content.
    resolver: Option<TokioResolver>,
}

impl Servers {
    /// Returns the resolver for this content of the file, or the last one if the content is not usable.
    fn resolver(&mut self, read: io::Result<Vec<u8>>) -> Result<TokioResolver, LookupError> {
        let is_known = read.as_ref().ok() == self.content.as_ref();
        if let Some(last) = self.resolver.as_ref().filter(|_| is_known) {
            return Ok(last.clone());
        }
        let built = match &read {
            Ok(content) => build(content).map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        self.content = read.ok();
        match (built, self.resolver.clone()) {
            (Ok(new), last) => {
                if last.is_some() {
                    tracing::info!(path = RESOLV_CONF, "DNS servers read again");
                }
                self.resolver = Some(new.clone());
                Ok(new)
            }
            (Err(error), Some(last)) => {
                tracing::warn!(path = RESOLV_CONF, %error, "failed to read DNS servers, using the last ones");
                Ok(last)
            }
            (Err(error), None) => Err(LookupError(format!("cannot read {RESOLV_CONF}: {error}"))),
        }
    }
}

/// Returns a resolver that queries the servers of a configuration.
fn build(content: &[u8]) -> Result<TokioResolver, NetError> {
    let (config, options) = parse_resolv_conf(content)?;
    let mut builder = TokioResolver::builder_with_config(config, TokioRuntimeProvider::default());
    *builder.options_mut() = options;
    set_options(builder.options_mut());
    builder.build()
}

impl SystemDns {
    async fn answer(&self, host: &str) -> Result<Answer, LookupError> {
        let content = tokio::fs::read(RESOLV_CONF).await;
        let resolver = self.lock().resolver(content)?;
        answer(&resolver, host).await
    }

    fn lock(&self) -> MutexGuard<'_, Servers> {
        self.servers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lookup for SystemDns {
    fn lookup(self: Arc<Self>, host: SmolStr, wait: Duration) -> BoxFuture<'static, Result<Answer, LookupError>> {
        Box::pin(async move {
            tokio::time::sleep(wait).await;
            let answer = timeout(TIMEOUT, self.answer(&host)).await;
            answer.unwrap_or_else(|_| Err(LookupError("no answer in time".into())))
        })
    }
}

/// Disables caches, hosts files and search lists: expiry is handled by the caller. Limits the time of a query.
pub(super) fn set_options(options: &mut ResolverOpts) {
    options.cache_size = 0;
    options.timeout = options.timeout.min(LONGEST_REPEAT);
    options.use_hosts_file = ResolveHosts::Never;
    // Records of aliases expire too.
    options.preserve_intermediates = true;
}

/// Queries both families concurrently. Addresses of one of them are sufficient. If one has no records and the other
/// fails, it is not known that the host has no address.
pub(super) async fn answer(resolver: &TokioResolver, host: &str) -> Result<Answer, LookupError> {
    // The trailing dot disables the system's search list.
    let name = format!("{}.", host.trim_end_matches('.'));
    let query = |record_type| resolver.lookup(name.as_str(), record_type);
    let (v4, v6) = tokio::join!(query(RecordType::A), query(RecordType::AAAA));
    match (records(v4), records(v6)) {
        (Ok(mut v4), Ok(v6)) => {
            v4.addresses.extend(v6.addresses);
            v4.ttl = v4.ttl.into_iter().chain(v6.ttl).min();
            Ok(v4)
        }
        (Ok(only), Err(_)) | (Err(_), Ok(only)) if !only.addresses.is_empty() => Ok(only),
        (Err(error), _) | (_, Err(error)) => Err(LookupError(error.to_string())),
    }
}

fn records(asked: Result<Records, NetError>) -> Result<Answer, NetError> {
    let records = match asked {
        Ok(records) => records,
        Err(error) if error.is_no_records_found() => return Ok(Answer::default()),
        Err(error) => return Err(error),
    };
    let addresses = records.answers().iter().filter_map(|record| match &record.data {
        RData::A(address) => Some(IpAddr::V4(address.0)),
        RData::AAAA(address) => Some(IpAddr::V6(address.0)),
        _ => None,
    });
    let ttl = records.answers().iter().map(|record| record.ttl).min();
    Ok(Answer {
        addresses: addresses.collect(),
        ttl: ttl.map(|seconds| Duration::from_secs(seconds.into())),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn servers_follow_the_file_and_survive_its_loss() {
        let mut servers = Servers::default();
        let missing = || Err(io::Error::from(io::ErrorKind::NotFound));
        let mut attempts = |read: io::Result<&str>| {
            let resolver = servers.resolver(read.map(|text| text.as_bytes().to_vec()));
            resolver.map(|resolver| resolver.options().attempts).ok()
        };
        assert_eq!(attempts(missing()), None);
        assert_eq!(attempts(Ok("options attempts:3\n")), None, "no server");
        let first = "nameserver 10.0.0.1\noptions attempts:3\n";
        assert_eq!(attempts(Ok(first)), Some(3));
        assert_eq!(attempts(Ok(first)), Some(3));
        for unusable in [missing(), missing(), Ok(""), Ok("")] {
            assert_eq!(attempts(unusable), Some(3), "the last servers");
        }
        assert_eq!(attempts(Ok("nameserver 10.0.0.2\noptions attempts:4\n")), Some(4));
        assert_eq!(attempts(Ok(first)), Some(3));
    }
}
