//! Rule: each dependency of the workspace has a comment above it that says why it is needed.
//!
//! Crates of the workspace itself, which have a path, need none.

/// Violations in the text of the workspace's Cargo.toml.
pub(super) fn check(manifest: &str) -> Vec<String> {
    let mut violations = Vec::new();
    let mut is_inside = false;
    let mut has_reason = false;
    for (number, line) in (1..).zip(manifest.lines()) {
        if line.starts_with('[') {
            is_inside = line == "[workspace.dependencies]";
        } else if is_inside && line.contains('=') && !line.starts_with('#') {
            let name = line.split('=').next().unwrap_or_default().trim();
            if !has_reason && !line.contains("path =") {
                violations.push(format!(
                    "Cargo.toml:{number}: `{name}` needs a comment above it that says why it is used"
                ));
            }
        }
        has_reason = line.starts_with("# ");
    }
    violations
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dependency_needs_a_reason_of_its_own() {
        let manifest = "[workspace.dependencies]\nours = { path = \"ours\" }\n# Why.\na = \"1\"\n\
                        b = \"1\"\n[other]\nc = \"1\"\n";
        let found = check(manifest);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].starts_with("Cargo.toml:5: `b`"), "{found:?}");
    }
}
