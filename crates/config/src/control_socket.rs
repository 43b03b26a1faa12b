//! The setting of a control socket: who may connect, and which methods the socket answers.

use std::path::PathBuf;
use std::str::FromStr;

use blockhouse_nbd::SocketPermissions;

use crate::socket_options::{PrivatePermissions, split_options};

/// The methods that change no disk, export or job, and no guest's rights.
const READING: &[&str] = &[
    "server.version",
    "disk.list",
    "export.list",
    "limit.get",
    "snapshot.list",
    "bitmap.list",
    "backup.list",
    "stats.get",
    "disk.stats",
    "job.list",
    "event.subscribe",
    "event.unsubscribe",
];

/// All other methods.
const CHANGING: &[&str] = &[
    "server.reload",
    "server.upgrade",
    "disk.open",
    "disk.close",
    "disk.set",
    "disk.resize",
    "disk.refresh",
    "disk.fork",
    "disk.transaction",
    "image.create",
    "socket.add",
    "socket.remove",
    "disk.rollback",
    "export.add",
    "export.remove",
    "limit.set",
    "snapshot.create",
    "snapshot.delete",
    "snapshot.rename",
    "bitmap.add",
    "bitmap.remove",
    "bitmap.clear",
    "bitmap.enable",
    "bitmap.disable",
    "bitmap.merge",
    "backup.begin",
    "backup.end",
    "job.start",
    "job.pause",
    "job.resume",
    "job.set-speed",
    "job.complete",
    "job.cancel",
    "job.dismiss",
];

/// The names of all methods, each once.
pub fn all_methods() -> impl Iterator<Item = &'static str> {
    READING.iter().chain(CHANGING).copied()
}

/// A control socket: `SOCKET[,mode=MODE][,group=GROUP][,read-only|,methods=NAME+NAME...]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlSocket {
    /// The path.
    pub path: PathBuf,
    /// The users that may connect.
    pub permissions: SocketPermissions,
    /// The methods that it answers.
    pub answers: Answers,
}

/// The methods that a control socket answers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Answers {
    /// All.
    #[default]
    All,
    /// The methods that change nothing.
    Reading,
    /// These, and `server.version`.
    Named(Vec<String>),
}

impl Answers {
    /// Whether this method is answered.
    pub fn has(&self, method: &str) -> bool {
        match self {
            Self::All => true,
            Self::Reading => READING.contains(&method),
            Self::Named(names) => {
                method == "server.version" || names.iter().any(|name| name == method)
            }
        }
    }

    /// Whether a method that changes something is answered.
    pub fn has_changes(&self) -> bool {
        CHANGING.iter().any(|name| self.has(name))
    }

    /// # Errors
    /// The method is not answered at this socket.
    pub fn check(&self, method: &str) -> Result<(), String> {
        if self.has(method) {
            return Ok(());
        }
        let why = match self {
            Self::Reading => "it is read-only",
            Self::All | Self::Named(_) => "it has a list of methods",
        };
        Err(format!(
            "this control socket does not answer {method:?}: {why}; 'server.version' tells what it answers"
        ))
    }
}

impl FromStr for ControlSocket {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (path, options) = split_options(text);
        if path.is_empty() {
            return Err("a path is missing: SOCKET[,OPTION...]".into());
        }
        let mut permissions = PrivatePermissions::default();
        let mut answers = Answers::All;
        for option in options {
            let given = match option.split_once('=') {
                _ if permissions.take(&option)? => continue,
                None if option == "read-only" => Answers::Reading,
                Some(("methods", names)) => named(names)?,
                _ => {
                    return Err(format!(
                        "there is no option '{option}'; use mode=0660, group=GROUP, read-only or \
                         methods=NAME+NAME, and ',,' for a comma in the path"
                    ));
                }
            };
            if std::mem::replace(&mut answers, given) != Answers::All {
                return Err("read-only and methods= are one choice, which is made once".into());
            }
        }
        Ok(Self { path: path.into(), permissions: permissions.get(), answers })
    }
}

/// The methods of a list; `GROUP.*` stands for all methods of a group.
fn named(list: &str) -> Result<Answers, String> {
    let mut named = Vec::new();
    for word in list.split('+') {
        let group = word.strip_suffix('*').filter(|group| group.ends_with('.'));
        let is_meant = |name: &str| match group {
            Some(group) => name.starts_with(group),
            None => name == word,
        };
        let before = named.len();
        named.extend(all_methods().filter(|name| is_meant(name)).map(str::to_owned));
        if named.len() == before {
            return Err(format!("there is no method '{word}'; docs/control.md has all of them"));
        }
    }
    Ok(Answers::Named(named))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_says_who_may_connect_and_what_it_answers() {
        let parse = |text: &str| text.parse::<ControlSocket>().expect(text);
        let plain = parse("/run/c");
        assert_eq!((plain.permissions, plain.answers), (SocketPermissions::PRIVATE, Answers::All));
        let reading = parse("/run/a,,b,mode=0666,read-only");
        assert_eq!(reading.path, PathBuf::from("/run/a,b"));
        assert_eq!(reading.permissions.mode, Some(0o666));
        assert!(reading.answers.has("disk.list") && !reading.answers.has("disk.close"));
        assert!(!reading.answers.has_changes());
        let named = parse("/run/c,group=7,methods=snapshot.*+disk.list");
        assert_eq!(named.permissions, SocketPermissions { mode: Some(0o660), group: Some(7) });
        for (method, is_answered) in
            [("snapshot.create", true), ("disk.list", true), ("disk.open", false)]
        {
            assert_eq!(named.answers.has(method), is_answered, "{method}");
            assert_eq!(named.answers.check(method).is_ok(), is_answered, "{method}");
        }
        assert!(named.answers.has_changes() && named.answers.has("server.version"));
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for (text, why) in [
            ("", "a path is missing"),
            ("/c,readonly", "no option 'readonly'"),
            ("/c,mode=rw", "octal mode"),
            ("/c,methods=disk.lost", "no method 'disk.lost'"),
            ("/c,methods=", "no method ''"),
            ("/c,methods=*", "no method '*'"),
            ("/c,read-only,methods=disk.list", "one choice"),
        ] {
            let error = text.parse::<ControlSocket>().expect_err(text);
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
