//! The parts of ADS messages that a proxy needs to track resources: names, versions and references.
//!
//! Decoding whole messages would cost the client more than encoding them costs the server.

use crate::support::ads::Type;

impl Type {
    fn of(url: &[u8]) -> Option<Type> {
        Type::ALL.into_iter().find(|kind| kind.url().as_bytes() == url)
    }

    /// The type that resources of this type refer to.
    pub(crate) fn referred(self) -> Option<Type> {
        match self {
            Type::Cluster => Some(Type::Endpoints),
            Type::Listener => Some(Type::Route),
            Type::Endpoints | Type::Route => None,
        }
    }

    /// Returns true if its resources are subscribed by name.
    pub(crate) fn is_named(self) -> bool {
        matches!(self, Type::Endpoints | Type::Route)
    }

    /// Calls `found` with each name that a resource of this type refers to.
    pub(crate) fn references<'a>(self, body: &'a [u8], mut found: impl FnMut(&'a [u8])) {
        match self {
            Type::Cluster => found_endpoints(body).into_iter().for_each(found),
            Type::Listener => found_routes(body, &mut found),
            Type::Endpoints | Type::Route => {}
        }
    }
}

/// The EDS service name of a cluster.
fn found_endpoints(cluster: &[u8]) -> Option<&[u8]> {
    const EDS: u64 = 3;
    let (mut name, mut service, mut is_eds) = (None, None, false);
    for field in Fields(cluster) {
        match field {
            (1, Value::Bytes(bytes)) => name = Some(bytes),
            (2, Value::Number(number)) => is_eds = number == EDS,
            (3, Value::Bytes(config)) => service = text(config, 2).filter(|service| !service.is_empty()),
            _ => {}
        }
    }
    service.or(name).filter(|_| is_eds)
}

/// The route configurations that a listener's connection managers refer to.
fn found_routes<'a>(listener: &'a [u8], found: &mut impl FnMut(&'a [u8])) {
    let chains = all(listener, 3).chain(all(listener, 25));
    for filter in chains.flat_map(|chain| all(chain, 3)) {
        let Some(any) = text(filter, 4) else { continue };
        if !text(any, 1).is_some_and(|url| url.ends_with(b".HttpConnectionManager")) {
            continue;
        }
        let rds = text(any, 2).and_then(|manager| text(manager, 3));
        rds.and_then(|rds| text(rds, 2)).into_iter().for_each(&mut *found);
    }
}

/// A response of either protocol.
pub(crate) struct Response<'a> {
    pub(crate) kind: Type,
    pub(crate) version: &'a [u8],
    pub(crate) nonce: &'a [u8],
    pub(crate) resources: Vec<Resource<'a>>,
    pub(crate) removed: Vec<&'a [u8]>,
}

/// A resource. In the state-of-the-world protocol it has no name and no version.
pub(crate) struct Resource<'a> {
    pub(crate) name: &'a [u8],
    pub(crate) version: &'a [u8],
    pub(crate) body: &'a [u8],
}

impl<'a> Response<'a> {
    /// Decodes a response; `None` if its type has no subscription.
    pub(crate) fn read(message: &'a [u8], is_delta: bool) -> Option<Response<'a>> {
        let (mut version, mut url, mut nonce): (&[u8], &[u8], &[u8]) = (&[], &[], &[]);
        let (mut resources, mut removed) = (Vec::new(), Vec::new());
        for (tag, value) in Fields(message) {
            let Value::Bytes(bytes) = value else { continue };
            match tag {
                1 => version = bytes,
                2 if is_delta => resources.push(Resource::read(bytes)),
                2 => resources.push(Resource {
                    name: &[],
                    version: &[],
                    body: text(bytes, 2).unwrap_or_default(),
                }),
                4 => url = bytes,
                5 => nonce = bytes,
                6 if is_delta => removed.push(bytes),
                _ => {}
            }
        }
        Some(Response {
            kind: Type::of(url)?,
            version,
            nonce,
            resources,
            removed,
        })
    }
}

impl<'a> Resource<'a> {
    fn read(bytes: &'a [u8]) -> Resource<'a> {
        Resource {
            name: text(bytes, 3).unwrap_or_default(),
            version: text(bytes, 1).unwrap_or_default(),
            body: text(bytes, 2).and_then(|any| text(any, 2)).unwrap_or_default(),
        }
    }
}

/// Appends a length-delimited field.
pub(crate) fn put(tag: u8, value: &[u8], out: &mut Vec<u8>) {
    out.push(tag << 3 | 2);
    let mut length = value.len();
    while length > 127 {
        out.push(length as u8 & 127 | 128);
        length >>= 7;
    }
    out.push(length as u8);
    out.extend_from_slice(value);
}

fn all(message: &[u8], tag: u64) -> impl Iterator<Item = &[u8]> {
    Fields(message).filter_map(move |field| match field {
        (given, Value::Bytes(bytes)) if given == tag => Some(bytes),
        _ => None,
    })
}

fn text(message: &[u8], tag: u64) -> Option<&[u8]> {
    all(message, tag).next()
}

enum Value<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

/// The fields of a message, up to the first invalid one.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn number(&mut self) -> Option<u64> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let (byte, rest) = self.0.split_first()?;
            self.0 = rest;
            number |= u64::from(byte & 127) << shift;
            if byte & 128 == 0 {
                return Some(number);
            }
        }
        None
    }

    fn bytes(&mut self, count: usize) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(bytes)
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = (u64, Value<'a>);

    fn next(&mut self) -> Option<Self::Item> {
        let key = self.number()?;
        let value = match key & 7 {
            0 => Value::Number(self.number()?),
            1 => Value::Bytes(self.bytes(8)?),
            2 => {
                let length = self.number()?;
                Value::Bytes(self.bytes(usize::try_from(length).ok()?)?)
            }
            5 => Value::Bytes(self.bytes(4)?),
            _ => return None,
        };
        Some((key >> 3, value))
    }
}
