//! The merged Gateways of a router, which its clusters, listeners and routes share.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use super::{BuildContext, selected::Selected};
use crate::{
    base::{ObjectKey, Shared},
    model::{
        Service, ServiceKey,
        gateway::{ExposedPort, MergedGateway, NO_TRANSLATION_LABEL},
        service::Protocol,
    },
    table::{Memo, Memoized},
};

/// The Gateways of a router and the ports of its services. Part of keys.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GatewayView {
    /// The Gateways that select the router, oldest first.
    pub gateways: Shared<[ObjectKey]>,
    /// The ports that its services expose, in lookup order.
    pub exposed: Shared<[ExposedPort]>,
}

/// The merged Gateways of each router, for the duration of one update. Without it, clusters and routes of a router with
/// many Gateways take a third longer (bench `suite`, case `gateways`).
pub type GatewayMemo = Memo<GatewayView, MergedGateway>;

impl GatewayView {
    /// Returns the view of a selected router.
    pub fn of(ctx: &BuildContext, selected: &Selected) -> Self {
        // TCP and UDP may share a port number. Both the targets and the ports of a service may be tens of thousands.
        let mut udp: BTreeMap<&ServiceKey, BTreeSet<u32>> = BTreeMap::new();
        let exposed = selected.targets.iter().filter_map(|target| {
            let service = ctx.service(&target.service)?;
            let of_service = udp.entry(&target.service).or_insert_with(|| udp_numbers(service));
            let own = target.own.as_deref().filter(|own| own.protocol == Protocol::Udp);
            Some(ExposedPort {
                service: target.service.clone(),
                number: target.port,
                target: target.target_port,
                udp: of_service.contains(&target.port) || own.is_some_and(|own| own.number == target.port),
                untranslated: service.label(NO_TRANSLATION_LABEL).is_some(),
            })
        });
        Self {
            gateways: selected.gateways.clone(),
            exposed: exposed.collect::<Vec<_>>().into(),
        }
    }

    /// Returns the merged Gateways.
    pub fn merged(&self, ctx: &BuildContext) -> Memoized<MergedGateway> {
        let memo: &GatewayMemo = ctx.memo.get();
        memo.get(ctx.cx, self.clone(), |cx| {
            MergedGateway::of(cx, ctx.mesh, &self.gateways, &self.exposed)
        })
    }
}

/// Returns the numbers of the UDP ports of a service.
fn udp_numbers(service: &Service) -> BTreeSet<u32> {
    let ports = service.ports.iter().filter(|port| port.protocol == Protocol::Udp);
    ports.map(|port| port.number).collect()
}
