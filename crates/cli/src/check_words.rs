//! The lines that `qemu-img check` prints for findings (`Leaked cluster`, `ERROR cluster`), because
//! scripts look for these lines.

use blockhouse_disk::CheckReport;
use blockhouse_format::qcow2::{Finding, Refcounts, Repair};

/// A line for each finding, without flags that follow from a wrong refcount. For a repair, each
/// refcount has a second line, `Repairing` if it is repaired, and flags have the one line of what
/// is left of them. As in `qemu-img check`, bad references to a cluster come first.
pub fn lines(found: &CheckReport, repair: Option<Repair>) -> Vec<String> {
    let all = || found.findings.iter();
    let is_count = |finding: &&Finding| matches!(finding, Finding::Refcount { .. });
    let is_flag = |finding: &&Finding| matches!(finding, Finding::CopiedFlag { .. });
    let early = all().filter(|finding| !is_count(finding) && !is_flag(finding)).filter_map(line);
    let counts = all().filter(is_count).filter_map(line);
    let repaired = all().filter(|finding| is_count(finding) && repair.is_some());
    let flags = all().filter(is_flag);
    let late = repaired.chain(flags).filter_map(|finding| line_of_repair(finding, repair));
    early.chain(counts).chain(late).collect()
}

fn line(finding: &Finding) -> Option<String> {
    Some(match finding {
        Finding::Words(words) => format!("ERROR: {words}"),
        Finding::PastEnd { offset, length } => format!(
            "ERROR: counting reference for region exceeding the end of the file by one cluster or more: offset {offset:#x} \
             size {length:#x}"
        ),
        Finding::Refcount { recorded, counted, .. } => {
            let what = if recorded > counted { "Leaked" } else { "ERROR" };
            format!("{what} {}", of_cluster(finding)?)
        }
        Finding::CopiedFlag { contradicts: Refcounts::Counted, .. } => return None,
        Finding::CopiedFlag { .. } => format!("ERROR {}", of_flag(finding)?),
    })
}

fn line_of_repair(finding: &Finding, repair: Option<Repair>) -> Option<String> {
    let is_leak =
        matches!(finding, Finding::Refcount { recorded, counted, .. } if recorded > counted);
    match repair {
        None => return line(finding),
        Some(Repair::Leaks) if !is_leak => return line(finding),
        Some(Repair::Leaks | Repair::All) => {}
    }
    if let Finding::CopiedFlag { contradicts: Refcounts::OnDisk, .. } = finding {
        return None;
    }
    of_cluster(finding).or_else(|| of_flag(finding)).map(|what| format!("Repairing {what}"))
}

fn of_cluster(finding: &Finding) -> Option<String> {
    match finding {
        Finding::Refcount { cluster, recorded, counted } => {
            Some(format!("cluster {cluster} refcount={recorded} reference={counted}"))
        }
        _ => None,
    }
}

fn of_flag(finding: &Finding) -> Option<String> {
    match finding {
        Finding::CopiedFlag { l1_index: Some(index), entry, refcount, .. } => Some(format!(
            "OFLAG_COPIED L2 cluster: l1_index={index} l1_entry={entry:x} refcount={refcount}"
        )),
        Finding::CopiedFlag { entry, refcount, .. } => {
            Some(format!("OFLAG_COPIED data cluster: l2_entry={entry:x} refcount={refcount}"))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_has_its_line() {
        let findings = vec![
            Finding::Words("a bitmap is bad".into()),
            Finding::Refcount { cluster: 6, recorded: 1, counted: 3 },
            Finding::CopiedFlag {
                l1_index: None,
                entry: 0xc0,
                refcount: 3,
                contradicts: Refcounts::Counted,
            },
            Finding::Refcount { cluster: 7, recorded: 2, counted: 1 },
            Finding::PastEnd { offset: 1 << 20, length: 512 },
        ];
        let found = CheckReport { findings, ..CheckReport::default() };
        let past =
            "exceeding the end of the file by one cluster or more: offset 0x100000 size 0x200";
        let plain = lines(&found, None);
        assert!(plain[1].ends_with(past), "{plain:?}");
        let counts =
            ["ERROR cluster 6 refcount=1 reference=3", "Leaked cluster 7 refcount=2 reference=1"];
        assert_eq!(
            (plain[0].as_str(), &plain[2..]),
            ("ERROR: a bitmap is bad", &counts.map(str::to_owned)[..])
        );
        let repaired = lines(&found, Some(Repair::All));
        assert_eq!(repaired[4], "Repairing cluster 6 refcount=1 reference=3");
        assert_eq!(repaired[6], "Repairing OFLAG_COPIED data cluster: l2_entry=c0 refcount=3");
        let leaks = lines(&found, Some(Repair::Leaks));
        assert_eq!(leaks[4], "ERROR cluster 6 refcount=1 reference=3");
        assert_eq!(leaks[5], "Repairing cluster 7 refcount=2 reference=1");
        assert_eq!(leaks.len(), 6, "{leaks:?}");
    }
}
