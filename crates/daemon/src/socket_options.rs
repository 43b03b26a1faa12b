//! Who may connect to the Unix sockets of a server, as people write it.

use std::str::FromStr;

use blockhouse_nbd::SocketPermissions;
use nix::unistd::Group;

/// The mode of a socket's file: `0660`.
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

/// The group of a socket's file: a name or a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketGroup(u32);

impl FromStr for SocketGroup {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(id) = text.parse() {
            return Ok(Self(id));
        }
        match Group::from_name(text) {
            Ok(Some(group)) => Ok(Self(group.gid.as_raw())),
            Ok(None) => {
                Err(format!("there is no group {text:?} on this host; 'getent group' lists them"))
            }
            Err(errno) => Err(format!("cannot look the group {text:?} up: {}", errno.desc())),
        }
    }
}

/// Who may connect; with a group alone, its members may.
pub fn permissions(mode: Option<SocketMode>, group: Option<SocketGroup>) -> SocketPermissions {
    let mode = mode.or(group.map(|_| SocketMode(0o660)));
    SocketPermissions { mode: mode.map(|mode| mode.0), group: group.map(|group| group.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_octal_and_groups_have_names_or_numbers() {
        for (text, mode) in [("0660", 0o660), ("600", 0o600), ("0777", 0o777)] {
            assert_eq!(text.parse(), Ok(SocketMode(mode)));
        }
        for text in ["", "66", "0o660", "1777", "0680", "+660", "rw-rw----"] {
            assert!(text.parse::<SocketMode>().is_err(), "{text}");
        }
        assert_eq!("root".parse(), Ok(SocketGroup(0)));
        assert_eq!("123".parse(), Ok(SocketGroup(123)));
        let error = "no such group".parse::<SocketGroup>().expect_err("it is missing");
        assert!(error.contains("getent group"), "{error}");
    }

    #[test]
    fn a_group_alone_may_connect() {
        let group = permissions(None, Some(SocketGroup(7)));
        assert_eq!(group, SocketPermissions { mode: Some(0o660), group: Some(7) });
        assert_eq!(permissions(None, None), SocketPermissions::default());
    }
}
