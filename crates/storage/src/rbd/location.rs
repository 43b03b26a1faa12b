//! The location of an image in Ceph: `rbd:POOL/IMAGE[@SNAPSHOT][?conf=FILE&id=USER]`.
//!
//! The part before the question mark is the image's name as Ceph's tools write it (`rbd(8)`), with
//! a namespace as `POOL/NAMESPACE/IMAGE`. A percent sign and two hexadecimal digits stand for a
//! byte, as in a URI; for example, `%3F` is a question mark.
//!
//! QEMU's form is accepted too: `rbd:POOL/IMAGE[@SNAPSHOT]:conf=FILE:id=USER`. In that form a
//! backslash escapes the next character.

use std::fmt;
use std::str::FromStr;

use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, utf8_percent_encode};

/// The prefix of a location.
pub(crate) const SCHEME: &str = "rbd:";

/// Characters that must be escaped in a name or a value.
const ENCODED: &AsciiSet = &CONTROLS.add(b'%').add(b'?').add(b'&').add(b'@').add(b' ').add(b':');
/// A name that contains one of these options is in QEMU's form.
const QEMU_OPTIONS: [&str; 6] = ["id", "conf", "mon_host", "auth_supported", "key", "keyring"];

/// An image in Ceph, or a snapshot of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RbdLocation {
    pool: String,
    namespace: Option<String>,
    image: String,
    snapshot: Option<String>,
    configuration: Option<String>,
    user: Option<String>,
}

impl RbdLocation {
    /// The pool's name.
    pub fn pool(&self) -> &str {
        &self.pool
    }

    /// The namespace in the pool; `None` is the default namespace.
    pub fn namespace(&self) -> Option<&str> {
        self.namespace.as_deref()
    }

    /// The image's name.
    pub fn image(&self) -> &str {
        &self.image
    }

    /// The name of the image's snapshot; `None` is the image as it is now.
    pub fn snapshot(&self) -> Option<&str> {
        self.snapshot.as_deref()
    }

    /// The path of the cluster's configuration file. `None` is the file in `$CEPH_CONF`, or else
    /// librados's default files.
    pub fn configuration(&self) -> Option<&str> {
        self.configuration.as_deref()
    }

    /// The user, without `client.`; `None` is `admin`.
    pub fn user(&self) -> Option<&str> {
        self.user.as_deref()
    }

    /// An image of this name in the same pool.
    #[must_use]
    pub fn with_image(&self, name: &str) -> Self {
        Self { image: name.to_owned(), snapshot: None, ..self.clone() }
    }

    /// A snapshot of the image.
    #[must_use]
    pub fn at_snapshot(&self, name: &str) -> Self {
        Self { snapshot: Some(name.to_owned()), ..self.clone() }
    }

    fn parse(text: &str) -> Result<Self, String> {
        let rest = text.strip_prefix(SCHEME).ok_or("it does not begin with rbd:")?;
        if is_of_qemu(rest) {
            return Self::parse_of_qemu(rest);
        }
        let (name, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (name, snapshot) = match name.split_once('@') {
            Some((name, snapshot)) => (name, Some(part(snapshot, "snapshot")?)),
            None => (name, None),
        };
        let parts: Vec<&str> = name.split('/').collect();
        let (pool, namespace, image) = match parts[..] {
            [pool, image] => (pool, None, image),
            [pool, namespace, image] => (pool, Some(part(namespace, "namespace")?), image),
            _ => return Err("an image in Ceph is written rbd:POOL/IMAGE".into()),
        };
        let (pool, image) = (part(pool, "pool")?, part(image, "image")?);
        let (mut configuration, mut user) = (None, None);
        for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
            let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
            let value = part(value, "value")?;
            let known = match name {
                "conf" => configuration.replace(value),
                "id" => user.replace(value),
                _ => return Err(format!("there is no parameter '{name}'; use conf=FILE, id=USER")),
            };
            if known.is_some() {
                return Err(format!("the parameter {name} is given twice"));
            }
        }
        if let Some(user) = user.as_ref().and_then(|user| user.strip_prefix("client.")) {
            return Err(format!("a user is named without 'client.': id={user}"));
        }
        Ok(Self { pool, namespace, image, snapshot, configuration, user })
    }
}

impl RbdLocation {
    /// Parses `rest`, the part after the scheme in QEMU's form. Converts it to the form with a
    /// question mark first.
    fn parse_of_qemu(rest: &str) -> Result<Self, String> {
        let mut parts = split_escaped(rest).into_iter();
        let mut text = format!("{SCHEME}{}?", parts.next().unwrap_or_default());
        for option in parts {
            match option.split_once('=') {
                Some(("conf" | "id", _)) => text.push_str(&format!("{option}&")),
                Some((name, _)) => {
                    return Err(format!(
                        "the option {name} is not understood; write it into conf=FILE"
                    ));
                }
                None => return Err(format!("'{option}' is no option of the form NAME=VALUE")),
            }
        }
        Self::parse(&text)
    }
}

/// Whether a name that follows the scheme is in QEMU's form.
fn is_of_qemu(rest: &str) -> bool {
    let is_option =
        |part: &str| part.split_once('=').is_some_and(|(name, _)| QEMU_OPTIONS.contains(&name));
    !rest.contains('?') && rest.split(':').skip(1).any(is_option)
}

/// The parts between colons, percent-encoded. A backslash in `text` escapes the next character.
fn split_escaped(text: &str) -> Vec<String> {
    const ESCAPED: &AsciiSet = &ENCODED.add(b'/').add(b'=');
    let mut parts = vec![String::new()];
    let mut characters = text.chars();
    while let Some(next) = characters.next() {
        let part = parts.last_mut().expect("it begins with one");
        let mut buffer = [0; 4];
        match next {
            ':' => parts.push(String::new()),
            '\\' => {
                let escaped = characters.next().unwrap_or('\\').encode_utf8(&mut buffer);
                part.extend(utf8_percent_encode(escaped, ESCAPED));
            }
            '%' | '&' => part.extend(utf8_percent_encode(next.encode_utf8(&mut buffer), ENCODED)),
            other => part.push(other),
        }
    }
    parts
}

/// A name or value, decoded.
fn part(text: &str, what: &str) -> Result<String, String> {
    let decoded = percent_decode_str(text).decode_utf8();
    let decoded = decoded.map_err(|_| format!("the {what} is not UTF-8"))?;
    if decoded.is_empty() {
        return Err(format!("the {what} is missing; an image in Ceph is written rbd:POOL/IMAGE"));
    }
    if decoded.contains('\0') {
        return Err(format!("the {what} has a zero byte"));
    }
    Ok(decoded.into_owned())
}

impl FromStr for RbdLocation {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::parse(text)
    }
}

impl fmt::Display for RbdLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let encode = |text| utf8_percent_encode(text, ENCODED);
        write!(f, "{SCHEME}{}/", encode(&self.pool))?;
        if let Some(namespace) = &self.namespace {
            write!(f, "{}/", encode(namespace))?;
        }
        write!(f, "{}", encode(&self.image))?;
        if let Some(snapshot) = &self.snapshot {
            write!(f, "@{}", encode(snapshot))?;
        }
        let parameters = [("conf", &self.configuration), ("id", &self.user)];
        let given =
            parameters.into_iter().filter_map(|(name, value)| Some((name, value.as_ref()?)));
        for (index, (name, value)) in given.enumerate() {
            write!(f, "{}{name}={}", if index == 0 { '?' } else { '&' }, encode(value))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_location_names_image_snapshot_and_cluster() {
        let location: RbdLocation = "rbd:p/i@s?conf=/etc/a.conf&id=vm".parse().unwrap();
        assert_eq!((location.pool(), location.image()), ("p", "i"));
        assert_eq!((location.snapshot(), location.user()), (Some("s"), Some("vm")));
        assert_eq!(location.configuration(), Some("/etc/a.conf"));
        let location: RbdLocation = "rbd:p/n/i%3F".parse().unwrap();
        assert_eq!((location.namespace(), location.image()), (Some("n"), "i?"));
        assert_eq!((location.snapshot(), location.configuration()), (None, None));
    }

    #[test]
    fn the_form_of_qemu_means_the_same() {
        for (theirs, ours) in [
            ("rbd:p/i:id=vm:conf=/etc/c.conf", "rbd:p/i?id=vm&conf=/etc/c.conf"),
            ("rbd:p/n/i@s:conf=/c", "rbd:p/n/i@s?conf=/c"),
            (r"rbd:p/a\:id\=x:id=b", "rbd:p/a%3Aid%3Dx?id=b"),
            (r"rbd:p/a\@b:id=100%&", "rbd:p/a%40b?id=100%25%26"),
        ] {
            let [theirs, ours] = [theirs, ours].map(|text| text.parse::<RbdLocation>().unwrap());
            assert_eq!(theirs, ours);
        }
    }

    #[test]
    fn what_cannot_be_meant_is_refused() {
        for (text, why) in [
            ("rbd:image", "POOL/IMAGE"),
            ("rbd:a/b/c/d", "POOL/IMAGE"),
            ("rbd:/image", "pool is missing"),
            ("rbd:pool/", "image is missing"),
            ("rbd:pool/image@", "snapshot is missing"),
            ("rbd:pool/image?conf=", "value is missing"),
            ("rbd:pool/image?user=x", "id=USER"),
            ("rbd:pool/image?id=a&id=b", "twice"),
            ("rbd:pool/image?id=client.vm", "id=vm"),
            ("rbd:pool/image:id=admin:mon_host=a", "conf=FILE"),
            ("rbd:pool/image:id=admin:x", "NAME=VALUE"),
            ("rbd:image:id=admin", "POOL/IMAGE"),
            ("rbd:pool/%00", "zero byte"),
            ("rbd:pool/%ff", "UTF-8"),
        ] {
            let refusal = text.parse::<RbdLocation>().unwrap_err();
            assert!(refusal.contains(why), "{text}: {refusal}");
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_again(
            names in prop::array::uniform2("[^/\0]{1,12}"),
            namespace in prop::option::of("[^/\0]{1,12}"),
            values in prop::array::uniform3(prop::option::of("[^\0]{1,12}")),
        ) {
            let [pool, image] = names;
            let [snapshot, configuration, user] = values;
            let user = user.map(|user| format!("u{user}"));
            let location =
                RbdLocation { pool, namespace, image, snapshot, configuration, user };
            let text = location.to_string();
            prop_assert_eq!(text.parse(), Ok(location), "{}", text);
        }
    }
}
