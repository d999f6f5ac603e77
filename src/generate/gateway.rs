//! What the configuration of a router is merged from: the part of keys that clusters, listeners and routes share.

use super::{BuildContext, selected::Selected};
use crate::{
    base::{ObjectKey, Shared},
    model::{
        gateway::{ExposedPort, MergedGateway, NO_TRANSLATION_LABEL},
        service::Protocol,
    },
    table::{Memo, Memoized},
};

/// The Gateways of a router and the ports of its services.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GatewayView {
    /// The Gateways that select it, oldest first.
    pub gateways: Shared<[ObjectKey]>,
    /// The ports that its services expose, in the order in which they are looked up.
    pub exposed: Shared<[ExposedPort]>,
}

/// The merged configuration of each router, for the time of one update.
pub type GatewayMemo = Memo<GatewayView, MergedGateway>;

impl GatewayView {
    /// The view of a selected router.
    pub fn of(ctx: &BuildContext, selected: &Selected) -> Self {
        let exposed = selected.targets.iter().filter_map(|target| {
            let service = ctx.service(&target.service)?;
            // TCP and UDP may share a number.
            let mut same = service.ports.iter().filter(|port| port.number == target.port);
            Some(ExposedPort {
                service: target.service.clone(),
                number: target.port,
                target: target.target_port,
                udp: same.any(|port| port.protocol == Protocol::Udp),
                untranslated: service.label(NO_TRANSLATION_LABEL).is_some(),
            })
        });
        Self {
            gateways: selected.gateways.clone(),
            exposed: exposed.collect::<Vec<_>>().into(),
        }
    }

    /// What the router serves.
    pub fn merged(&self, ctx: &BuildContext) -> Memoized<MergedGateway> {
        let memo: &GatewayMemo = ctx.memo.get();
        memo.get(ctx.cx, self.clone(), |cx| {
            MergedGateway::of(cx, ctx.mesh, &self.gateways, &self.exposed)
        })
    }
}
