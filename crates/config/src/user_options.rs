//! Users and groups as people write them, and the user and group that a server switches to.

use std::str::FromStr;

use nix::unistd::{Group, Uid, User};

/// A user: a name or a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UserName {
    id: u32,
    /// The user's primary group, if the host knows the user.
    group: Option<u32>,
}

impl FromStr for UserName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found =
            find_user(text).map_err(|why| format!("cannot look the user {text:?} up: {why}"))?;
        match (found, text.parse()) {
            (Some((id, group)), _) => Ok(Self { id, group: Some(group) }),
            (None, Ok(id)) => Ok(Self { id, group: None }),
            (None, Err(_)) => {
                Err(format!("there is no user {text:?} on this host; 'getent passwd' lists them"))
            }
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
        let found =
            find_group(text).map_err(|why| format!("cannot look the group {text:?} up: {why}"))?;
        found.map(Self).ok_or_else(|| {
            format!("there is no group {text:?} on this host; 'getent group' lists them")
        })
    }
}

/// Whether the C library is linked statically. The NSS modules of the host's C library crash in a
/// static program (those of systemd did). So a static program reads only /etc/passwd and
/// /etc/group.
const IS_STATIC: bool = cfg!(target_feature = "crt-static");

/// The ids of a user, by its name or number, and of its group.
fn find_user(text: &str) -> Result<Option<(u32, u32)>, String> {
    if IS_STATIC {
        let file = std::fs::read_to_string("/etc/passwd").map_err(|error| error.to_string())?;
        return Ok(
            entry(&file, text).and_then(|(id, rest)| Some((id, rest.first()?.parse().ok()?)))
        );
    }
    let found = match text.parse() {
        Ok(id) => User::from_uid(Uid::from_raw(id)),
        Err(_) => User::from_name(text),
    };
    let found = found.map_err(|errno| errno.desc().to_owned())?;
    Ok(found.map(|user| (user.uid.as_raw(), user.gid.as_raw())))
}

/// The id of a group, by its name.
fn find_group(name: &str) -> Result<Option<u32>, String> {
    if IS_STATIC {
        let file = std::fs::read_to_string("/etc/group").map_err(|error| error.to_string())?;
        return Ok(entry(&file, name).map(|(id, _)| id));
    }
    let found = Group::from_name(name).map_err(|errno| errno.desc().to_owned())?;
    Ok(found.map(|group| group.gid.as_raw()))
}

/// The id of the entry with this name or number in the text of /etc/passwd or /etc/group, and the
/// fields after the id.
fn entry<'a>(file: &'a str, text: &str) -> Option<(u32, Vec<&'a str>)> {
    file.lines().find_map(|line| {
        let mut fields = line.split(':');
        let (name, _, id) = (fields.next()?, fields.next()?, fields.next()?);
        let is_it = !name.is_empty() && (name == text || id == text);
        Some((id.parse().ok().filter(|_| is_it)?, fields.collect()))
    })
}

impl GroupName {
    /// The group's number.
    pub fn id(self) -> u32 {
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

/// The user and group that a server switches to; `None` if it keeps its own.
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
    fn the_files_have_what_the_c_library_says() {
        let passwd = "root:x:0:0:root:/root:/bin/sh\n\nbroken\n:x:7:7::/:\nvm:x:64055:994::/:\n";
        assert_eq!(entry(passwd, "vm"), Some((64055, vec!["994", "", "/", ""])));
        assert_eq!(entry(passwd, "64055").map(|(id, _)| id), Some(64055));
        for missing in ["v", "7", "", "broken", "x", "994"] {
            assert_eq!(entry(passwd, missing), None, "{missing}");
        }
        let of_this_host = std::fs::read_to_string("/etc/passwd").expect("every host has it");
        assert_eq!(find_user("root"), Ok(Some((0, 0))));
        assert_eq!(entry(&of_this_host, "root").map(|(id, rest)| (id, rest[0])), Some((0, "0")));
    }

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
