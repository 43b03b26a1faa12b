//! Rule: a crate uses only crates of lower layers, and none of its own layer.
//!
//! Development dependencies are exempt: any test may use the simulator.

use serde_json::Value;

/// Every crate under `crates/` and its layer.
const LAYERS: &[(&str, u32)] = &[
    ("blockhouse-core", 0),
    ("blockhouse-figures", 0),
    ("blockhouse-engine", 1),
    ("blockhouse-sim", 1),
    ("blockhouse-format", 1),
    ("blockhouse-nbd-protocol", 1),
    ("blockhouse-tls", 1),
    ("blockhouse-crypt", 2),
    ("blockhouse-storage", 2),
    ("blockhouse-disk", 3),
    ("blockhouse-nbd", 4),
    ("blockhouse-vhost-user", 4),
    ("blockhouse-ublk", 4),
    ("blockhouse-kernel-nbd", 4),
    ("blockhouse-jobs", 4),
    ("blockhouse-instances", 5),
    ("blockhouse-images", 6),
    ("blockhouse-config", 7),
    ("blockhouse-daemon", 8),
    ("blockhouse-qmp", 9),
    ("blockhouse", 10),
];
/// Packages outside of the layers, which no crate of a layer uses.
const OUTSIDE: &[&str] = &[
    "blockhouse-examples",
    "blockhouse-fuzz",
    "blockhouse-tests",
    "lab-compare",
    "lab-images",
    "lab-kill",
    "lab-models",
    "lab-nbd",
    "lab-tools",
    "lab-vm",
    "xtask",
];

fn layer(name: &str) -> Option<u32> {
    LAYERS.iter().find(|(known, _)| *known == name).map(|(_, layer)| *layer)
}

pub(super) fn check(packages: &[&Value]) -> Vec<String> {
    let mut violations = Vec::new();
    for package in packages {
        let name = package["name"].as_str().unwrap_or_default();
        if OUTSIDE.contains(&name) {
            continue;
        }
        let Some(own) = layer(name) else {
            violations
                .push(format!("{name}: has no layer: give it one in xtask/src/tidy/layers.rs"));
            continue;
        };
        let dependencies = package["dependencies"].as_array().map_or(&[][..], Vec::as_slice);
        for dependency in dependencies.iter().filter(|dependency| dependency["kind"] != "dev") {
            let used = dependency["name"].as_str().unwrap_or_default();
            // A package with a path but no layer is one of `OUTSIDE`.
            let below = layer(used).map_or(dependency["path"].is_null(), |layer| layer < own);
            if !below {
                violations
                    .push(format!("{name} (layer {own}) depends on {used}, which is not below it"));
            }
        }
    }
    violations
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn package(name: &str, dependency: &str, kind: Option<&str>) -> Value {
        json!({ "name": name, "dependencies": [{ "name": dependency, "kind": kind, "path": "/x" }] })
    }

    #[test]
    fn only_downwards() {
        let verdict = |name, dependency, kind| check(&[&package(name, dependency, kind)]).len();
        assert_eq!(verdict("blockhouse-disk", "blockhouse-core", None), 0);
        assert_eq!(verdict("blockhouse-sim", "blockhouse-engine", None), 1);
        assert_eq!(verdict("blockhouse-core", "blockhouse-disk", Some("build")), 1);
        assert_eq!(verdict("blockhouse-format", "blockhouse-sim", Some("dev")), 0);
        assert_eq!(verdict("blockhouse-nbd", "xtask", None), 1);
        assert_eq!(verdict("blockhouse-stray", "blockhouse-core", None), 1);
    }
}
