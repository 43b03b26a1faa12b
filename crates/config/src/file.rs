//! The configuration of a server with many disks: a TOML file (docs/operations.md).
//!
//! Guarantee: an error in the file is reported with its line and column, before anything is opened
//! or changed.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;
use blockhouse_nbd::uri::{Address, NbdUri};
use serde::Deserialize;
use toml::Spanned;

use crate::disk::DiskConfig;
use crate::export_address::ExportAddress;
use crate::limits::LimitsConfig;
use crate::offers::Offer;
use crate::server::ServerConfig;
use crate::setup::{Setup, UblkSetup};

/// The file as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default = "no_server")]
    server: Spanned<ServerConfig>,
    #[serde(default)]
    groups: BTreeMap<String, Spanned<LimitsConfig>>,
    #[serde(default)]
    disk: Vec<Spanned<DiskConfig>>,
}

fn no_server() -> Spanned<ServerConfig> {
    Spanned::new(0..0, ServerConfig::default())
}

/// Reads the file, and returns the setup of the server that it describes. A reload reads it again.
///
/// # Errors
/// The file cannot be read or contains an error: one line, with the position of the error.
pub fn read(path: &Path) -> Result<Setup> {
    let text = std::fs::read_to_string(path).map_err(|error| {
        let name = path.display();
        anyhow::anyhow!(
            "{name}: cannot read the configuration: {error}; name a file that describes disks \
             (docs/operations.md)"
        )
    })?;
    let setup = parse(&text).map_err(|Wrong { at, why }| {
        let (line, column) = place(&text, at);
        anyhow::anyhow!("{}:{line}:{column}: {why}", path.display())
    })?;
    Ok(Setup { config: Some(path.to_owned()), ..setup })
}

/// Adds to a setup the export at `address` of the disk with index `image`.
fn serve(setup: &mut Setup, image: usize, address: &ExportAddress) {
    match address {
        ExportAddress::VhostUser(path) => setup.devices.push((path.clone(), image)),
        ExportAddress::Ublk(id) => setup.ublk.push(UblkSetup { id: Some(*id), disk: image }),
        ExportAddress::Nbd(uri) => {
            let offer = Offer::new(uri.export.clone(), image);
            match setup.nbd.iter_mut().find(|(address, _)| *address == uri.address) {
                Some((_, offers)) => offers.push(offer),
                None => setup.nbd.push((uri.address.clone(), vec![offer])),
            }
        }
    }
}

/// An error, and its byte offset in the file.
#[derive(Debug)]
struct Wrong {
    at: usize,
    why: String,
}

fn parse(text: &str) -> Result<Setup, Wrong> {
    let file: File = toml::from_str(text).map_err(|error| Wrong {
        at: error.span().map_or(0, |span| span.start),
        why: error.message().replace('\n', ", "),
    })?;
    let at = file.server.span().start;
    let wrong = |why| Wrong { at, why };
    let server = file.server.into_inner();
    server.check().map_err(wrong)?;
    let groups = limits_of_groups(&file.groups)?;
    let mut disks: Vec<DiskConfig> = Vec::new();
    for disk in file.disk {
        let at = disk.span().start;
        let disk = configured(disk.into_inner(), &groups, &disks);
        disks.push(disk.map_err(|why| Wrong { at, why })?);
    }
    let tls = server.tls(&uris(&disks)).map_err(wrong)?;
    let user = server.user().map_err(wrong)?;
    let mut setup = Setup { server, tls, user, ..Setup::default() };
    for (image, disk) in disks.iter().enumerate() {
        disk.exports.iter().for_each(|address| serve(&mut setup, image, address));
    }
    Ok(Setup { disks, ..setup })
}

/// The URIs of all NBD exports of the disks.
fn uris(disks: &[DiskConfig]) -> Vec<NbdUri> {
    let addresses = disks.iter().flat_map(|disk| &disk.exports);
    let uris = addresses.filter_map(|address| match address {
        ExportAddress::Nbd(uri) => Some(uri.clone()),
        ExportAddress::VhostUser(_) | ExportAddress::Ublk(_) => None,
    });
    uris.collect()
}

/// The limits that groups of disks share, by the groups' names.
type Groups<'a> = BTreeMap<&'a str, LimitsConfig>;

fn limits_of_groups(groups: &BTreeMap<String, Spanned<LimitsConfig>>) -> Result<Groups<'_>, Wrong> {
    let limits = |name: &str, config: &LimitsConfig| match config.rates()? {
        _ if config.group.is_some() => Err("a group is in no other group".to_owned()),
        rates if rates.is_unlimited() => Err("a group has a rate, like iops = 1000".into()),
        _ => Ok(LimitsConfig { group: Some(name.to_owned()), ..config.clone() }),
    };
    let mut all = Groups::new();
    for (name, config) in groups {
        let wrong = |why| Wrong { at: config.span().start, why };
        all.insert(name, limits(name, config.get_ref()).map_err(wrong)?);
    }
    Ok(all)
}

/// The limits of a disk: those of its group, or its own.
fn shared(limits: LimitsConfig, groups: &Groups<'_>) -> Result<LimitsConfig, String> {
    let Some(name) = &limits.group else { return Ok(limits) };
    if !limits.rates()?.is_unlimited() {
        return Err(format!("the limits of a group are in a table [groups.{name}]"));
    }
    match groups.get(name.as_str()) {
        Some(limits) => Ok(limits.clone()),
        None => Err(format!("there is no table [groups.{name}]")),
    }
}

/// Checks a disk, also against the disks before it, and sets the limits of its group.
fn configured(
    disk: DiskConfig,
    groups: &Groups<'_>,
    others: &[DiskConfig],
) -> Result<DiskConfig, String> {
    let mut disk = disk.checked()?;
    disk.limits = shared(disk.limits, groups)?;
    if others.iter().any(|other| other.name() == disk.name()) {
        return Err(format!("two disks are called {:?}; give each its own name", disk.name()));
    }
    for (index, address) in disk.exports.iter().enumerate() {
        if matches!(address, ExportAddress::Nbd(uri) if matches!(uri.address, Address::Tcp { port: 0, .. }))
        {
            return Err(format!("{address}: a configuration names the port"));
        }
        let mut before =
            others.iter().flat_map(|other| &other.exports).chain(&disk.exports[..index]);
        if before.any(|other| other == address) {
            return Err(format!("{address}: is the address of another export, too"));
        }
    }
    Ok(disk)
}

/// The line and the column of a byte, from 1.
fn place(text: &str, at: usize) -> (usize, usize) {
    let before = text.get(..at).unwrap_or(text);
    let line = before.rsplit('\n').next().unwrap_or_default();
    (before.matches('\n').count() + 1, line.chars().count() + 1)
}

#[cfg(test)]
mod tests {
    use blockhouse_engine::DeviceCommands;

    use super::*;

    fn refused(text: &str) -> String {
        let Wrong { at, why } = parse(text).expect_err("it is wrong");
        let (line, column) = place(text, at);
        format!("{line}:{column}: {why}")
    }

    #[test]
    fn a_file_says_what_the_command_line_can() {
        let text = r#"
            [server]
            control = "/run/c"
            engine = "threads"
            limits = ["stall=5", "clients=7"]
            [[disk]]
            path = "/vm/a.qcow2"
            cache = "writeback"
            exports = ["nbd+unix:///a?socket=/run/s", "/run/a.vu"]
            [[disk]]
            path = "/vm/b.img"
            create = "1G"
            exports = ["nbd+unix:///b?socket=/run/s", "/dev/ublkb3"]
            limits = { group = "g" }
            [groups.g]
            iops = 100
            bps = "1M"
        "#;
        let setup = parse(text).expect("it is right");
        assert_eq!(setup.server.limits.connections, 7);
        assert_eq!(
            setup.disks.iter().map(DiskConfig::name).collect::<Vec<_>>(),
            ["a.qcow2", "b.img"]
        );
        assert_eq!(setup.devices, [("/run/a.vu".into(), 0)]);
        assert_eq!(setup.ublk, [UblkSetup { id: Some(3), disk: 1 }]);
        assert_eq!(setup.loops().commands, DeviceCommands::Allowed);
        assert_eq!(setup.disks[1].limits.bps, Some(1 << 20));
        let [(_, offers)] = &setup.nbd[..] else { panic!("one socket: {:?}", setup.nbd) };
        assert_eq!(offers.iter().map(|offer| offer.image).collect::<Vec<_>>(), [0, 1]);
        assert!(parse("").is_ok(), "disks may come later");
    }

    #[test]
    fn what_is_wrong_is_told_with_its_place() {
        for (text, told) in [
            ("[server]\nworker = 2\n", "2:1: unknown field `worker`"),
            ("[server]\nengine = \"warp\"\n", "2:10: there is no engine 'warp'"),
            ("[server]\nlimits = [\"stall=x\"]\n", "2:11: stall=x: write seconds"),
            ("[server]\nsocket-mode = \"9\"\n", "2:15: write an octal mode, like 0660"),
            ("[server]\nworkers = 0\n", "workers and queues are from 1 to 256"),
            ("[[disk]]\n", "missing field `path`"),
            ("[[disk]]\npath = \"/a\"\ncache = \"x\"\n", "3:9: there is no cache mode 'x'"),
            ("[[disk]]\npath = \"a\"\n", "1:1: a: write the whole path"),
            (
                "[[disk]]\npath = \"/a\"\n[[disk]]\npath = \"/b/a\"\n",
                "3:1: two disks are called \"a\"",
            ),
            ("[[disk]]\npath = \"/a\"\nexports = [\"/s\", \"/s\"]\n", "another export"),
            ("[[disk]]\npath = \"/a\"\nexports = [\"nbd://h:0/\"]\n", "names the port"),
            (
                "[[disk]]\npath = \"/a\"\nlimits = { group = \"g\" }\n",
                "1:1: there is no table [groups.g]",
            ),
            ("[[disk]]\npath = \"/a\"\nlimits = { iops = 0 }\n", "1:1: iops cannot be 0"),
            ("[groups.g]\ngroup = \"h\"\n", "a group is in no other group"),
            ("[groups.g]\n", "a group has a rate"),
            ("[[disk]\n", "1:"),
        ] {
            let error = refused(text);
            assert!(error.contains(told), "{text}: {error}");
        }
    }
}
