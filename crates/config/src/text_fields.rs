//! Values that people write as texts, in the configuration and in requests: the words of the
//! command line.

use std::fmt;
use std::marker::PhantomData;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use blockhouse_images::is_address;
use schemars::JsonSchema;
use serde::de::{Deserialize, Deserializer, Error, Visitor};
use serde::{Serialize, Serializer};

use crate::size;

/// The first value that occurs twice.
pub fn repeated<T: PartialEq>(values: &[T]) -> Option<&T> {
    let is_second = |(index, value): &(usize, &T)| values[..*index].contains(value);
    values.iter().enumerate().find(is_second).map(|(_, value)| value)
}

/// A value that is written as a text.
///
/// # Errors
/// It is no text, or makes no sense.
pub fn text<'de, D: Deserializer<'de>, T: FromStr<Err = String>>(from: D) -> Result<T, D::Error> {
    struct Text<T>(PhantomData<T>);
    impl<T: FromStr<Err = String>> Visitor<'_> for Text<T> {
        type Value = T;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a text")
        }

        fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
            text.parse().map_err(E::custom)
        }
    }
    from.deserialize_str(Text(PhantomData))
}

/// As [`text`], for a field that may be left out.
///
/// # Errors
/// As there.
pub fn some_text<'de, D: Deserializer<'de>, T: FromStr<Err = String>>(
    from: D,
) -> Result<Option<T>, D::Error> {
    text(from).map(Some)
}

/// As [`text`], for a list.
///
/// # Errors
/// As there.
pub fn texts<'de, D: Deserializer<'de>, T: FromStr<Err = String>>(
    from: D,
) -> Result<Vec<T>, D::Error> {
    let texts = Vec::<TextOf<T>>::deserialize(from)?;
    Ok(texts.into_iter().map(|TextOf(value)| value).collect())
}

/// A size that may be left out: bytes, or a text like "20G".
///
/// # Errors
/// It is neither.
pub fn some_size<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    struct Bytes;
    impl Visitor<'_> for Bytes {
        type Value = u64;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a size: bytes, or a text like \"20G\"")
        }

        fn visit_u64<E: Error>(self, bytes: u64) -> Result<u64, E> {
            // File offsets are signed.
            i64::try_from(bytes).map(|_| bytes).map_err(|_| E::custom("too large"))
        }

        fn visit_i64<E: Error>(self, bytes: i64) -> Result<u64, E> {
            u64::try_from(bytes).map_err(|_| E::custom("a size is not negative"))
        }

        fn visit_str<E: Error>(self, text: &str) -> Result<u64, E> {
            size::parse(text).map_err(E::custom)
        }
    }
    from.deserialize_any(Bytes).map(Some)
}

/// Writes a path as text. Bytes that are not UTF-8 become replacement characters, because one path
/// must not make an answer with many impossible.
///
/// # Errors
/// Errors of the serializer.
pub fn lossy<S: Serializer>(path: &Path, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&path.to_string_lossy())
}

/// As [`lossy`], for a path that may be left out.
///
/// # Errors
/// Errors of the serializer.
pub fn some_lossy<S: Serializer>(path: &Option<PathBuf>, to: S) -> Result<S::Ok, S::Error> {
    path.as_ref().map(|path| path.to_string_lossy()).serialize(to)
}

/// Like [`check_absolute`], for an image: the address of an image on another server is accepted.
///
/// # Errors
/// As there.
pub fn check_image_name(name: &Path) -> Result<(), String> {
    if is_address(name.as_os_str().as_bytes()) { Ok(()) } else { check_absolute(name) }
}

/// Refuses a path that depends on the working directory of a server.
///
/// # Errors
/// The path is relative.
pub fn check_absolute(path: &Path) -> Result<(), String> {
    if path.is_absolute() {
        Ok(())
    } else {
        Err(format!("{}: write the whole path, from / on", path.display()))
    }
}

/// A value that is written as a text, as an element of a list.
struct TextOf<T>(T);

impl<'de, T: FromStr<Err = String>> Deserialize<'de> for TextOf<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        text(from).map(Self)
    }
}

/// For the schema: what [`some_size`] reads.
#[derive(JsonSchema)]
#[serde(untagged)]
pub enum Size {
    /// A number.
    Bytes(u64),
    /// With a unit.
    Text(String),
}
