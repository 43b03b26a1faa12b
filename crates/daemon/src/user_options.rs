//! Users and groups as people write them, and which of them a server becomes.

use std::str::FromStr;

use nix::unistd::{Group, Uid, User};

/// A user: a name or a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UserName {
    id: u32,
    /// Its group, where the host knows the user.
    group: Option<u32>,
}

impl FromStr for UserName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = match text.parse() {
            Ok(id) => User::from_uid(Uid::from_raw(id)),
            Err(_) => User::from_name(text),
        };
        match (found, text.parse()) {
            (Ok(Some(user)), _) => {
                Ok(Self { id: user.uid.as_raw(), group: Some(user.gid.as_raw()) })
            }
            (Ok(None), Ok(id)) => Ok(Self { id, group: None }),
            (Ok(None), Err(_)) => {
                Err(format!("there is no user {text:?} on this host; 'getent passwd' lists them"))
            }
            (Err(errno), _) => Err(format!("cannot look the user {text:?} up: {}", errno.desc())),
        }
    }
}

/// A group: a name or a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupName(u32);

impl FromStr for GroupName {
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

impl GroupName {
    /// Its number.
    pub(crate) fn id(self) -> u32 {
        self.0
    }
}

/// The ids of a user and a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UserIds {
    /// The user's.
    pub user: u32,
    /// The group's.
    pub group: u32,
}

/// Who a server becomes; `None` where it stays who it is.
///
/// # Errors
/// A group without a user, and a user without a group.
pub fn ids(user: Option<UserName>, group: Option<GroupName>) -> Result<Option<UserIds>, String> {
    match (user, group) {
        (None, None) => Ok(None),
        (None, Some(_)) => Err("--group needs --user".into()),
        (Some(user), group) => match group.map(GroupName::id).or(user.group) {
            Some(group) => Ok(Some(UserIds { user: user.id, group })),
            None => Err(format!("this host knows no group of the user {}; add --group", user.id)),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_and_groups_have_names_or_numbers() {
        let root: UserName = "root".parse().expect("every host has it");
        assert_eq!(root, "0".parse().expect("a number"));
        assert_eq!(ids(Some(root), None), Ok(Some(UserIds { user: 0, group: 0 })));
        let unknown: UserName = "4242424".parse().expect("a number");
        assert!(ids(Some(unknown), None).is_err_and(|why| why.contains("--group")));
        let group = Some(GroupName(7));
        assert_eq!(ids(Some(unknown), group), Ok(Some(UserIds { user: 4242424, group: 7 })));
        assert!(ids(None, group).is_err_and(|why| why.contains("--user")));
        assert!("no such user".parse::<UserName>().is_err());
        assert_eq!("root".parse(), Ok(GroupName(0)));
        assert_eq!("123".parse(), Ok(GroupName(123)));
        let error = "no such group".parse::<GroupName>().expect_err("it is missing");
        assert!(error.contains("getent group"), "{error}");
    }
}
