//! The number of subsets that a declared subset counts as, where the output of objects is limited.
//!
//! The clusters of each subset repeat the policy that holds for it. So the size of the rule's policy multiplies like
//! the number of its subsets, also those of other rules that it is merged with.

use prost::Message;

use crate::{api::istio::traffic_policy::CommonSettings, proto::istio::networking::v1alpha3::DestinationRule};

/// The encoded size of a policy, in bytes, for which a subset counts once more. Most policies are smaller.
const BYTES: usize = 1 << 10;

/// The encoded sizes in bytes of the settings that clusters repeat: load balancer, connection pool, outlier detection
/// and TLS. `None` for those that are not set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct PolicySize([Option<usize>; 4]);

impl PolicySize {
    /// Returns the size of the policy that holds for a rule's clusters without a subset, the largest over all ports.
    pub(super) fn of_rule(rule: &DestinationRule) -> Self {
        let policy = rule.traffic_policy.as_deref();
        let of_ports = policy.into_iter().flat_map(|policy| &policy.port_level_settings);
        let general = policy.map(|policy| Self::of_settings(policy.into()));
        let of_ports = of_ports.map(|policy| Self::of_settings(policy.into()));
        of_ports.fold(general.unwrap_or_default(), Self::largest)
    }

    /// Returns the sizes of the settings for all ports or for one port. Settings that are left out have a limited size.
    fn of_settings(settings: CommonSettings<'_>) -> Self {
        let CommonSettings {
            load_balancer,
            connection_pool,
            outlier_detection,
            tls,
        } = settings;
        Self([
            load_balancer.map(Message::encoded_len),
            connection_pool.map(Message::encoded_len),
            outlier_detection.map(Message::encoded_len),
            tls.map(Message::encoded_len),
        ])
    }

    /// Returns the larger of each setting.
    pub(super) fn largest(self, other: Self) -> Self {
        self.with(other, Ord::max)
    }

    /// Returns the settings, and those of another policy for those that are not set.
    fn over(self, other: Self) -> Self {
        self.with(other, Option::or)
    }

    fn with(self, other: Self, choose: fn(Option<usize>, Option<usize>) -> Option<usize>) -> Self {
        Self(std::array::from_fn(|setting| choose(self.0[setting], other.0[setting])))
    }

    /// Returns true if a subset that inherits the policy counts more than once.
    pub(super) fn is_large(self) -> bool {
        self.units() > 1
    }

    /// Returns what a subset with this policy counts.
    fn units(self) -> u64 {
        1 + (self.0.into_iter().flatten().sum::<usize>() / BYTES) as u64
    }
}

/// Returns what each subset of a rule counts, in order: one, and one more for each full KiB of the policy that holds
/// for it. Subsets inherit a policy, which may be that of another rule.
pub(super) fn of_subsets(rule: &DestinationRule, inherited: PolicySize) -> impl Iterator<Item = u64> {
    let policies = rule.subsets.iter().map(|subset| subset.traffic_policy.as_deref());
    policies.map(move |own| match own {
        None => inherited.units(),
        Some(own) => {
            let general = PolicySize::of_settings(own.into()).over(inherited).units();
            let of_ports = own.port_level_settings.iter();
            let of_ports = of_ports.map(|policy| PolicySize::of_settings(policy.into()).units());
            of_ports.fold(general, u64::max)
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::istio::networking::v1alpha3::{
        ClientTlsSettings, Subset, TrafficPolicy, traffic_policy::PortTrafficPolicy,
    };

    fn tls(bytes: usize) -> Option<Box<ClientTlsSettings>> {
        Some(Box::new(ClientTlsSettings {
            // The key and the length take three bytes.
            sni: "s".repeat(bytes - 3),
            ..Default::default()
        }))
    }

    fn policy(bytes: usize, ports: &[usize]) -> Option<TrafficPolicy> {
        let of_port = |bytes: &usize| PortTrafficPolicy {
            tls: tls(*bytes),
            ..Default::default()
        };
        Some(TrafficPolicy {
            tls: tls(bytes),
            port_level_settings: ports.iter().map(of_port).collect(),
            ..Default::default()
        })
    }

    fn units(of_rule: Option<TrafficPolicy>, of_subsets: Vec<Option<TrafficPolicy>>) -> Vec<u64> {
        let subset = |policy: Option<TrafficPolicy>| Subset {
            traffic_policy: policy.map(Box::new),
            ..Default::default()
        };
        let rule = DestinationRule {
            traffic_policy: of_rule.map(Box::new),
            subsets: of_subsets.into_iter().map(subset).collect(),
            ..Default::default()
        };
        super::of_subsets(&rule, PolicySize::of_rule(&rule)).collect()
    }

    #[test]
    fn subsets_with_usual_policies_count_once() {
        let usual = || policy(1000, &[900, 900]);
        assert_eq!(units(None, vec![None, usual()]), [1, 1]);
        assert_eq!(units(usual(), vec![None, usual()]), [1, 1]);
        assert!(units(policy(9000, &[]), Vec::new()).is_empty());
    }

    #[test]
    fn each_kib_of_the_policy_counts() {
        let subsets = || vec![None, policy(3 << 10, &[]), policy(1000, &[5 << 10])];
        assert_eq!(units(None, subsets()), [1, 4, 6]);
        assert_eq!(units(policy(2 << 10, &[]), subsets()), [3, 4, 6]);
        assert_eq!(units(policy(1000, &[4 << 10, 2 << 10]), subsets()), [5, 4, 6]);
    }

    #[test]
    fn a_subset_inherits_what_it_does_not_set() {
        let own = TrafficPolicy {
            connection_pool: Some(Default::default()),
            ..Default::default()
        };
        assert_eq!(units(policy(2 << 10, &[]), vec![Some(own)]), [3]);
    }
}
