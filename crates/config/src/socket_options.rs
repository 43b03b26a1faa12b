//! Options that say which users may connect to a server's Unix sockets.

use std::str::FromStr;

use blockhouse_nbd::SocketPermissions;

use crate::user_options::GroupName;

/// The permission bits of a socket's file, such as `0660`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketMode(u32);

impl FromStr for SocketMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_octal = (3..=4).contains(&text.len()) && text.bytes().all(|c| c.is_ascii_digit());
        match u32::from_str_radix(text, 8) {
            Ok(mode) if is_octal && mode <= 0o777 => Ok(Self(mode)),
            _ => Err("write an octal mode, like 0660".into()),
        }
    }
}

/// Splits a text at its commas into the first part and the options after it. Two commas stand for
/// one comma inside of a part.
pub fn split_options(text: &str) -> (String, Vec<String>) {
    let mut parts = vec![String::new()];
    let mut letters = text.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            ',' if letters.next_if_eq(&',').is_none() => parts.push(String::new()),
            letter => parts.last_mut().expect("one at least").push(letter),
        }
    }
    let path = parts.remove(0);
    (path, parts)
}

/// Permissions of a socket that only the server's own user may connect to, unless the options
/// `mode=MODE` and `group=GROUP` allow more.
#[derive(Default)]
pub struct PrivatePermissions {
    mode: Option<SocketMode>,
    group: Option<GroupName>,
}

impl PrivatePermissions {
    /// Reads `mode=` or `group=`; `false` for any other option.
    ///
    /// # Errors
    /// The option's value is invalid.
    pub fn take(&mut self, option: &str) -> Result<bool, String> {
        match option.split_once('=') {
            Some(("mode", mode)) => self.mode = Some(mode.parse()?),
            Some(("group", group)) => self.group = Some(group.parse()?),
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// The permissions that the options gave.
    pub fn get(self) -> SocketPermissions {
        match (self.mode, self.group) {
            (None, None) => SocketPermissions::PRIVATE,
            (mode, group) => permissions(mode, group),
        }
    }
}

/// The permissions of a socket. A group without a mode means mode 0660: the group's members may
/// connect.
pub fn permissions(mode: Option<SocketMode>, group: Option<GroupName>) -> SocketPermissions {
    let mode = mode.or(group.map(|_| SocketMode(0o660)));
    SocketPermissions { mode: mode.map(|mode| mode.0), group: group.map(GroupName::id) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_octal() {
        for (text, mode) in [("0660", 0o660), ("600", 0o600), ("0777", 0o777)] {
            assert_eq!(text.parse(), Ok(SocketMode(mode)));
        }
        for text in ["", "66", "0o660", "1777", "0680", "+660", "rw-rw----"] {
            assert!(text.parse::<SocketMode>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_group_alone_may_connect() {
        let group = permissions(None, Some("7".parse().expect("a number")));
        assert_eq!(group, SocketPermissions { mode: Some(0o660), group: Some(7) });
        assert_eq!(permissions(None, None), SocketPermissions::default());
    }
}
