//! Lookups at the system's DNS servers.

use std::{net::IpAddr, sync::Arc, time::Duration};

use futures::future::BoxFuture;
use hickory_resolver::{
    TokioResolver,
    config::{ResolveHosts, ResolverOpts},
    lookup::Lookup as Records,
    net::NetError,
    proto::rr::{RData, RecordType},
};
use smol_str::SmolStr;
use tokio::{sync::OnceCell, time::timeout};

use super::{Answer, Lookup, LookupError};

/// Longest time of a lookup: endpoints wait for the first one. Shorter than the wait at the start.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Longest time until a query is repeated.
const LONGEST_REPEAT: Duration = Duration::from_secs(2);

/// Servers of `/etc/resolv.conf`, read on first use.
#[derive(Default)]
pub(super) struct SystemDns {
    resolver: OnceCell<TokioResolver>,
}

impl SystemDns {
    async fn answer(&self, host: &str) -> Result<Answer, LookupError> {
        let read = || async {
            let mut builder = TokioResolver::builder_tokio()?;
            set_options(builder.options_mut());
            builder.build()
        };
        let resolver = self.resolver.get_or_try_init(read).await;
        let resolver = resolver.map_err(|error| LookupError(format!("cannot read /etc/resolv.conf: {error}")))?;
        answer(resolver, host).await
    }
}

impl Lookup for SystemDns {
    fn ask(self: Arc<Self>, host: SmolStr, wait: Duration) -> BoxFuture<'static, Result<Answer, LookupError>> {
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
    let ask = |record_type| resolver.lookup(name.as_str(), record_type);
    let (v4, v6) = tokio::join!(ask(RecordType::A), ask(RecordType::AAAA));
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
