//! Digests as sixty-four lower-case hexadecimal digits in JSON: for `#[serde(with = "hotcell_policy::hex")]`.
//!
//! Exactly one spelling is read, the one that is written.

use hotcell_ledger::Digest;
use serde::{Deserialize, Deserializer, Serializer, de::Error};

/// Writes a digest.
pub fn serialize<S: Serializer>(digest: &Digest, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&digest.to_hex())
}

/// Reads a digest.
pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Digest, D::Error> {
    let text = String::deserialize(from)?;
    Digest::from_hex(&text).ok_or_else(|| {
        D::Error::custom(format!("{text:?} is not a digest: 64 lower-case hexadecimal digits"))
    })
}

/// The same for a digest that may be absent.
pub(crate) mod option {
    use super::{Deserialize, Deserializer, Digest, Error, Serializer};

    pub(crate) fn serialize<S: Serializer>(digest: &Option<Digest>, to: S) -> Result<S::Ok, S::Error> {
        match digest {
            Some(digest) => to.serialize_some(&digest.to_hex()),
            None => to.serialize_none(),
        }
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Digest>, D::Error> {
        match Option::<String>::deserialize(from)? {
            None => Ok(None),
            Some(text) => Digest::from_hex(&text).map(Some).ok_or_else(|| {
                D::Error::custom(format!("{text:?} is not a digest: 64 lower-case hexadecimal digits"))
            }),
        }
    }
}
