//! A minimal DER writer for certificates.
//!
//! Certificates are not written by a library because the issuer's name and key id must be equal byte for byte to those
//! of the signing certificate: verifiers may reject a name that was parsed and encoded again.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use time::OffsetDateTime;

pub(super) const SEQUENCE: u8 = 0x30;
pub(super) const SET: u8 = 0x31;
const BOOLEAN: u8 = 0x01;
const INTEGER: u8 = 0x02;
const BIT_STRING: u8 = 0x03;
const OCTET_STRING: u8 = 0x04;
const UTF8_STRING: u8 = 0x0c;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;

/// One value: tag, length, content.
pub(super) fn value(tag: u8, content: &[u8]) -> Vec<u8> {
    let length = content.len();
    let mut out = Vec::with_capacity(length + 6);
    out.push(tag);
    if length < 0x80 {
        out.push(length as u8);
    } else {
        let bytes = length.to_be_bytes();
        let zeros = bytes.iter().take_while(|byte| **byte == 0).count();
        out.push(0x80 | (bytes.len() - zeros) as u8);
        out.extend(bytes.iter().skip(zeros));
    }
    out.extend_from_slice(content);
    out
}

/// A constructed value.
pub(super) fn nested(tag: u8, parts: &[&[u8]]) -> Vec<u8> {
    value(tag, &parts.concat())
}

/// An unsigned integer from big-endian bytes.
pub(super) fn unsigned(bytes: &[u8]) -> Vec<u8> {
    let zeros = bytes.iter().take_while(|byte| **byte == 0).count();
    let digits = bytes.get(zeros..).unwrap_or_default();
    // A set first bit would make the number negative; an empty number is invalid.
    let sign: &[u8] = if digits.first().is_none_or(|first| *first >= 0x80) {
        &[0]
    } else {
        &[]
    };
    nested(INTEGER, &[sign, digits])
}

/// A bit string of whole bytes.
pub(super) fn bits(bytes: &[u8]) -> Vec<u8> {
    nested(BIT_STRING, &[&[0], bytes])
}

/// An octet string.
pub(super) fn octets(bytes: &[u8]) -> Vec<u8> {
    value(OCTET_STRING, bytes)
}

/// Named bits of a byte, without trailing zeros, as DER requires.
pub(super) fn flags(byte: u8) -> Vec<u8> {
    value(BIT_STRING, &[byte.trailing_zeros().min(7) as u8, byte])
}

/// A UTF-8 string.
pub(super) fn utf8(text: &str) -> Vec<u8> {
    value(UTF8_STRING, text.as_bytes())
}

/// An X.509 extension that verifiers may ignore. `content` is its value in DER.
pub(super) fn extension(oid: &[u8], content: &[u8]) -> Vec<u8> {
    nested(SEQUENCE, &[oid, &octets(content)])
}

/// A critical X.509 extension: verifiers that do not know it must reject the certificate.
pub(super) fn critical_extension(oid: &[u8], content: &[u8]) -> Vec<u8> {
    nested(SEQUENCE, &[oid, &[BOOLEAN, 1, 0xff], &octets(content)])
}

/// A time as in RFC 5280: UTCTime before 2050, GeneralizedTime from then on.
pub(super) fn time(at: SystemTime) -> Vec<u8> {
    let seconds = at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    // RFC 5280 section 4.1.2.5: 99991231235959Z means no expiry.
    let latest = 253_402_300_799;
    let at = OffsetDateTime::from_unix_timestamp(seconds.min(latest) as i64)
        .expect("because every second until the year 9999 is a date");
    let (year, month, day) = (at.year(), u8::from(at.month()), at.day());
    let rest = format!(
        "{month:02}{day:02}{:02}{:02}{:02}Z",
        at.hour(),
        at.minute(),
        at.second()
    );
    if year < 2050 {
        value(UTC_TIME, format!("{:02}{rest}", year % 100).as_bytes())
    } else {
        value(GENERALIZED_TIME, format!("{year:04}{rest}").as_bytes())
    }
}

/// Converts seconds since 1970; earlier times become 1970.
pub(super) fn system_time(seconds: i64) -> SystemTime {
    let since = Duration::from_secs(seconds.max(0).unsigned_abs());
    UNIX_EPOCH.checked_add(since).unwrap_or(UNIX_EPOCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_take_as_many_bytes_as_they_need() {
        assert_eq!(value(SEQUENCE, &[7]), [SEQUENCE, 1, 7]);
        assert_eq!(value(SEQUENCE, &[0; 0x7f]).get(..2), Some(&[SEQUENCE, 0x7f][..]));
        assert_eq!(value(SEQUENCE, &[0; 0x80]).get(..3), Some(&[SEQUENCE, 0x81, 0x80][..]));
        assert_eq!(
            value(SEQUENCE, &[0; 0x1234]).get(..4),
            Some(&[SEQUENCE, 0x82, 0x12, 0x34][..])
        );
    }

    #[test]
    fn numbers_are_short_and_not_negative() {
        assert_eq!(unsigned(&[0, 0, 5]), [INTEGER, 1, 5]);
        assert_eq!(unsigned(&[0x80]), [INTEGER, 2, 0, 0x80]);
        assert_eq!(unsigned(&[]), [INTEGER, 1, 0]);
        assert_eq!(flags(0xa0), [BIT_STRING, 2, 5, 0xa0]);
        assert_eq!(flags(0x04), [BIT_STRING, 2, 2, 0x04]);
    }

    #[test]
    fn years_have_two_digits_until_2050() {
        let text = |seconds| time(system_time(seconds)).split_off(2);
        assert_eq!(text(0), b"700101000000Z");
        assert_eq!(text(2_524_607_999), b"491231235959Z");
        assert_eq!(text(2_524_608_000), b"20500101000000Z");
        assert_eq!(text(i64::MAX), b"99991231235959Z");
        assert_eq!(text(-5), b"700101000000Z");
    }
}
