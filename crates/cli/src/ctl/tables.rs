//! Formats the results of `ctl` for people.
//!
//! Texts that others chose (names, paths) are escaped, so that they cannot control the terminal.

use blockhouse_config::size;
use blockhouse_daemon::control::Listed;
use serde_json::Value;

use crate::logging::visible;
use crate::snapshot_list;

/// The result of a method; empty if there is nothing to print.
pub fn show(method: &str, result: &Value) -> String {
    match method {
        "disk.list" => {
            let row = |disk: &Value| {
                let access = if disk["read-only"] == true { "read-only" } else { "" };
                let path = text(&disk["path"]);
                [
                    text(&disk["disk"]),
                    text(&disk["format"]),
                    bytes(&disk["size"]),
                    access.into(),
                    path,
                ]
            };
            let waits = result.as_array().into_iter().flatten();
            let waits = waits.filter(|disk| !disk["waits"].is_null());
            let waits =
                waits.map(|disk| format!("{}: {}", text(&disk["disk"]), text(&disk["waits"])));
            let held = result.as_array().into_iter().flatten();
            let held = held.filter(|disk| !disk["held"].is_null());
            let held = held.map(|disk| {
                let (disk, count) = (text(&disk["disk"]), text(&disk["held"]));
                let wait = if count == "1" { "request waits" } else { "requests wait" };
                format!("{disk}: {count} {wait} for room on the host")
            });
            let disks = table(["DISK", "FORMAT", "SIZE", "ACCESS", "PATH"], result, row);
            std::iter::once(disks).chain(waits).chain(held).collect::<Vec<_>>().join("\n")
        }
        "export.list" => {
            let row = |export: &Value| {
                let clients = export["clients"].as_u64();
                let clients = clients.map_or_else(|| "-".into(), |count| count.to_string());
                let is_read_only = export["read-only"] == true;
                let read_only = if is_read_only { " (read-only)" } else { "" };
                let address = format!("{}{read_only}", text(&export["export"]));
                let peers = peers(&export["peers"]);
                [text(&export["disk"]), text(&export["kind"]), clients, address, peers]
            };
            table(["DISK", "KIND", "CLIENTS", "EXPORT", "FROM"], result, row)
        }
        "disk.stats" => {
            let row = |disk: &Value| {
                let errors = disk["errors"].as_array().into_iter().flatten();
                let errors: u64 = errors.filter_map(|error| error["count"].as_u64()).sum();
                [
                    text(&disk["disk"]),
                    text(&disk["reads"]),
                    bytes(&disk["read-bytes"]),
                    text(&disk["writes"]),
                    bytes(&disk["written-bytes"]),
                    text(&disk["flushes"]),
                    errors.to_string(),
                ]
            };
            let heading = ["DISK", "READS", "READ", "WRITES", "WRITTEN", "FLUSHES", "ERRORS"];
            table(heading, result, row)
        }
        "job.list" => jobs(result),
        "job.start" => format!("started {}", text(&result["job"])),
        "job.complete" => {
            format!("complete; writes were held off for {} us", text(&result["pause-us"]))
        }
        "snapshot.list" => {
            let listed: Result<Vec<Listed>, _> = serde_json::from_value(result.clone());
            listed.map_or_else(|_| format!("{result:#}"), |list| snapshot_list::as_text(&list))
        }
        "bitmap.list" => bitmaps(result),
        "backup.begin" => begun(result),
        "backup.list" => backups(result),
        "snapshot.create" | "snapshot.delete" | "snapshot.rename" | "bitmap.add"
        | "bitmap.remove" | "bitmap.clear" | "bitmap.enable" | "bitmap.disable"
        | "bitmap.merge" => {
            format!("writes were held off for {} us", text(&result["pause-us"]))
        }
        "disk.fork" => forked(result),
        "disk.rollback" => format!(
            "is {} again; writes were held off for {} us",
            text(&result["layer"]),
            text(&result["pause-us"])
        ),
        "disk.open" => exports(result),
        "export.add" => format!("ready {}", text(&result["export"])),
        "disk.resize" => {
            format!("{} -> {}", bytes(&result["old-size"]), bytes(&result["size"]))
        }
        "disk.refresh" => {
            format!("{}, {} held requests", bytes(&result["size"]), text(&result["held"]))
        }
        "server.version" => version(result),
        "server.reload" => reloaded(result),
        "limit.get" => {
            let row = |disk: &Value| {
                let limits = limits(&disk["limits"]);
                [text(&disk["disk"]), limits, text(&disk["waiting"]), text(&disk["delayed"])]
            };
            table(["DISK", "LIMITS", "WAITING", "DELAYED"], result, row)
        }
        "backup.end" | "disk.close" | "export.remove" | "limit.set" | "disk.set" => String::new(),
        "job.pause" | "job.resume" | "job.set-speed" | "job.cancel" | "job.dismiss" => {
            String::new()
        }
        _ => format!("{result:#}"),
    }
}

/// The version first, then what the server can do.
fn version(result: &Value) -> String {
    let list = |key: &str| {
        let names = result[key].as_array().into_iter().flatten().map(text);
        names.collect::<Vec<_>>().join(" ")
    };
    let (version, protocol) = (text(&result["version"]), text(&result["protocol"]));
    format!(
        "version  {version}\nprotocol {protocol}\nsandbox  {}\nmethods  {}\nevents   {}",
        text(&result["sandbox"]),
        list("methods"),
        list("events")
    )
}

fn jobs(result: &Value) -> String {
    let row = |job: &Value| {
        let error = if job["error"].is_null() { String::new() } else { text(&job["error"]) };
        [
            text(&job["job"]),
            text(&job["kind"]),
            text(&job["disk"]),
            text(&job["status"]),
            bytes(&job["copied"]),
            bytes(&job["remaining"]),
            format!("{}/s", bytes(&job["rate"])),
            text(&job["target"]),
            error,
        ]
    };
    let heading =
        ["JOB", "KIND", "DISK", "STATUS", "COPIED", "REMAINING", "RATE", "TARGET", "ERROR"];
    table(heading, result, row)
}

/// The result of a fork: a line for each disk, then the pause.
fn forked(result: &Value) -> String {
    let disks = result["disks"].as_array().into_iter().flatten();
    let line = |disk: &Value| {
        let [name, overlay, layer] = ["disk", "overlay", "layer"].map(|key| text(&disk[key]));
        if disk["overlay"].is_null() {
            format!("{name}: goes on in {layer}")
        } else {
            format!("{name}: {overlay} over {layer}")
        }
    };
    let mut lines: Vec<_> = disks.map(line).collect();
    lines.push(format!("writes were held off for {} us", text(&result["pause-us"])));
    lines.join("\n")
}

/// The name of a backup, and a line for each address where its disks are served.
fn begun(result: &Value) -> String {
    let disks = result["disks"].as_array().into_iter().flatten();
    let exports = disks.flat_map(|disk| disk["exports"].as_array().into_iter().flatten());
    let heading = format!(
        "began {}; writes were held off for {} us",
        text(&result["backup"]),
        text(&result["pause-us"])
    );
    let lines = exports.map(|export| format!("ready {}", text(export)));
    let disks = result["disks"].as_array().into_iter().flatten();
    let full = disks.filter(|disk| !result["since"].is_null() && disk["since"].is_null());
    let full = full.map(|disk| {
        format!("in full {}: it has no bitmap {}", text(&disk["disk"]), text(&result["since"]))
    });
    std::iter::once(heading).chain(lines).chain(full).collect::<Vec<_>>().join("\n")
}

fn backups(result: &Value) -> String {
    let of_backup = |backup: &Value| {
        let name = backup["backup"].clone();
        let disks = backup["disks"].as_array().cloned().unwrap_or_default();
        disks.into_iter().map(move |mut disk| {
            disk["backup"] = name.clone();
            disk
        })
    };
    let rows: Vec<Value> = result.as_array().into_iter().flatten().flat_map(of_backup).collect();
    let row = |disk: &Value| {
        let exports = disk["exports"].as_array().into_iter().flatten().map(text);
        let error = if disk["error"].is_null() { String::new() } else { text(&disk["error"]) };
        [
            text(&disk["backup"]),
            text(&disk["disk"]),
            bytes(&disk["scratch-used"]),
            bytes(&disk["scratch-size"]),
            exports.collect::<Vec<_>>().join(" "),
            error,
        ]
    };
    let heading = ["BACKUP", "DISK", "SCRATCH", "AT MOST", "EXPORT", "ERROR"];
    table(heading, &Value::Array(rows), row)
}

fn bitmaps(result: &Value) -> String {
    let row = |bitmap: &Value| {
        let state = match (&bitmap["inconsistent"], &bitmap["recording"]) {
            (Value::Bool(true), _) => match bitmap["lacks-changes-since"].as_u64() {
                Some(since) => format!("lacks changes since {}", snapshot_list::date(since)),
                None => "inconsistent".into(),
            },
            (_, Value::Bool(true)) => "enabled".into(),
            _ => "disabled".into(),
        };
        let changed = if bitmap["count"].is_null() { "-".into() } else { bytes(&bitmap["count"]) };
        [text(&bitmap["name"]), bytes(&bitmap["granularity"]), state, changed]
    };
    table(["NAME", "GRANULARITY", "STATE", "CHANGED"], result, row)
}

/// An event: its name and its fields.
pub fn event(event: &Value) -> String {
    let fields = event.as_object().into_iter().flatten().filter(|(key, _)| *key != "event");
    let fields = fields.map(|(key, value)| format!(" {key}={}", text(value)));
    std::iter::once(text(&event["event"])).chain(fields).collect()
}

/// A line for each change that a reload made, or could not make.
fn reloaded(result: &Value) -> String {
    let of = |key: &str| {
        let all = result[key].as_array().into_iter().flatten();
        all.map(|one| visible(&format!("{key}: {}", one.as_str().unwrap_or_default())))
            .collect::<Vec<_>>()
    };
    ["opened", "closed", "added", "removed", "limited", "failed"].map(of).concat().join("\n")
}

/// A line for each address of a disk that was opened.
fn exports(result: &Value) -> String {
    let exports = result["exports"].as_array().into_iter().flatten();
    exports.map(|export| format!("ready {}", text(export))).collect::<Vec<_>>().join("\n")
}

/// The first four clients, and the number of the others.
fn peers(list: &Value) -> String {
    const SHOWN: usize = 4;
    let all: Vec<_> = list.as_array().into_iter().flatten().map(text).collect();
    let shown = all.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
    match all.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// Limits as `limit` takes them.
fn limits(limits: &Value) -> String {
    let all = limits.as_object().into_iter().flatten();
    let all: Vec<_> = all.map(|(key, value)| format!("{key}={}", text(value))).collect();
    if all.is_empty() { "off".into() } else { all.join(",") }
}

fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.escape_debug().to_string(),
        other => other.to_string(),
    }
}

fn bytes(value: &Value) -> String {
    value.as_u64().map_or_else(|| value.to_string(), size::show)
}

/// A heading and a row for each element, in columns; empty without elements.
fn table<const N: usize>(
    heading: [&str; N],
    elements: &Value,
    row: impl Fn(&Value) -> [String; N],
) -> String {
    let elements = elements.as_array().map_or(&[][..], Vec::as_slice);
    if elements.is_empty() {
        return String::new();
    }
    let rows: Vec<_> =
        std::iter::once(heading.map(str::to_owned)).chain(elements.iter().map(row)).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let widths: Vec<_> = (0..N).map(|column| width(column).unwrap_or(0)).collect();
    let line = |row: &[String; N]| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn columns_are_aligned_and_names_cannot_control_the_terminal() {
        let disks = json!([
            { "disk": "a", "format": "raw", "size": 1 << 30, "read-only": true, "path": "/a\u{1b}[2J" },
            { "disk": "long-name", "format": "qcow2", "size": 512, "read-only": false, "path": "/b" },
        ]);
        let shown = show("disk.list", &disks);
        let lines: Vec<_> = shown.lines().collect();
        assert_eq!(lines[0], "DISK       FORMAT  SIZE   ACCESS     PATH");
        assert_eq!(lines[1], r"a          raw     1 GiB  read-only  /a\u{1b}[2J");
        assert_eq!(lines[2], "long-name  qcow2   512 B             /b");
        assert_eq!(show("disk.list", &json!([])), "");
    }

    #[test]
    fn clients_are_told_by_who_they_are() {
        let export = |peers: &[&str]| json!([{ "disk": "a", "kind": "nbd", "clients": peers.len(), "export": "nbd://h/", "peers": peers }]);
        let shown = show("export.list", &export(&["process 7", "192.0.2.1"]));
        assert!(shown.ends_with("a     nbd   2        nbd://h/  process 7, 192.0.2.1"), "{shown}");
        let shown = show("export.list", &export(&["process 7"; 6]));
        assert!(shown.ends_with("process 7, process 7 and 2 more"), "{shown}");
    }

    #[test]
    fn a_reload_is_told_in_plain_words() {
        let done = json!({ "opened": ["a"], "failed": ["b: the job \"j\" works\u{1b}[2J; 'c'"] });
        let expected = "opened: a\nfailed: b: the job \"j\" works\\u{1b}[2J; 'c'";
        assert_eq!(show("server.reload", &done), expected);
    }

    #[test]
    fn an_event_is_a_line() {
        let told = json!({ "event": "client.left", "export": "nbd://h/", "peer": "process 7" });
        assert_eq!(event(&told), "client.left export=nbd://h/ peer=process 7");
    }
}
