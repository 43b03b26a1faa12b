//! The arrows between the modules of a crate, and the circles among them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::PathBuf;

use super::source::{Crate, Mention, ModulePath};

/// How many re-exports and imports are followed from one name; more than any crate has.
const MAX_HOPS: u32 = 16;

/// An arrow: one module names another.
#[derive(Clone, Debug)]
pub(super) struct Step {
    pub from: String,
    pub to: String,
    /// Relative to the crate's folder.
    pub file: PathBuf,
    /// Counted from 1.
    pub line: usize,
}

/// Modules that all reach each other.
#[derive(Debug)]
pub(super) struct Circle {
    pub modules: Vec<String>,
    /// A shortest way from the first module back to it.
    pub steps: Vec<Step>,
}

/// The modules of a crate, or its folders, with their arrows.
pub(super) struct Graph {
    arrows: BTreeMap<ModulePath, BTreeMap<ModulePath, Step>>,
}

impl Graph {
    /// The graph of modules: arrows lead to the modules that define the named items.
    pub fn of(source: &Crate) -> Self {
        Self::with(source, ModulePath::clone, |mention| defining_module(source, mention).cloned())
    }

    /// The graph of folders: arrows lead to the folders that are named.
    pub fn of_folders(source: &Crate) -> Self {
        let folder = |path: &ModulePath| path.first().cloned().into_iter().collect();
        Self::with(source, folder, |mention| {
            let path = absolute(source, &mention.scope, &mention.path)?;
            let is_folder = source.modules.keys().any(|module| module.first() == path.first());
            is_folder.then(|| folder(&path))
        })
    }

    /// Makes an arrow for each mention: from `room` of its module to `leads_to` of the mention.
    fn with(
        source: &Crate,
        room: impl Fn(&ModulePath) -> ModulePath,
        leads_to: impl Fn(&Mention) -> Option<ModulePath>,
    ) -> Self {
        let mut arrows: BTreeMap<ModulePath, BTreeMap<ModulePath, Step>> = BTreeMap::new();
        for (path, module) in &source.modules {
            let from = room(path);
            let own = arrows.entry(from.clone()).or_default();
            for mention in &module.mentions {
                let Some(to) = leads_to(mention) else { continue };
                if to != from {
                    let file = module.file.clone();
                    let step = Step { from: name(&from), to: name(&to), file, line: mention.line };
                    own.entry(to).or_insert(step);
                }
            }
        }
        Self { arrows }
    }

    /// All circles, except pairs of a module and one of its parts.
    pub fn circles(&self) -> Vec<Circle> {
        let mut left: BTreeSet<&ModulePath> = self.arrows.keys().collect();
        let mut circles = Vec::new();
        while let Some(first) = left.pop_first() {
            let forward = self.reachable(first);
            let circle: Vec<&ModulePath> = forward
                .iter()
                .copied()
                .filter(|module| self.reachable(module).contains(first))
                .collect();
            left.retain(|module| !circle.contains(module));
            if circle.len() > 1 && !is_module_and_part(&circle) {
                circles.push(Circle {
                    modules: circle.iter().map(|module| name(module)).collect(),
                    steps: self.way_round(circle[0]),
                });
            }
        }
        circles
    }

    /// The modules that arrows reach from `first`, and `first` itself.
    fn reachable<'a>(&'a self, first: &'a ModulePath) -> BTreeSet<&'a ModulePath> {
        let mut found = BTreeSet::from([first]);
        let mut next = vec![first];
        while let Some(module) = next.pop() {
            next.extend(self.arrows[module].keys().filter(|to| found.insert(*to)));
        }
        found
    }

    /// A shortest way from `first` back to it.
    fn way_round(&self, first: &ModulePath) -> Vec<Step> {
        let mut queue = VecDeque::from([(first, Vec::new())]);
        let mut seen = BTreeSet::new();
        while let Some((module, way)) = queue.pop_front() {
            for (to, step) in &self.arrows[module] {
                let mut way: Vec<Step> = way.clone();
                way.push(step.clone());
                if to == first {
                    return way;
                }
                if seen.insert(to) {
                    queue.push_back((to, way));
                }
            }
        }
        Vec::new()
    }
}

fn name(module: &ModulePath) -> String {
    if module.is_empty() { "the root".into() } else { module.join("::") }
}

/// Whether these are two modules, one of which is a part of the other.
fn is_module_and_part(circle: &[&ModulePath]) -> bool {
    matches!(circle, [one, other] if one.split_last().is_some_and(|(_, parent)| parent == *other)
        || other.split_last().is_some_and(|(_, parent)| parent == *one))
}

/// The file that defines the mentioned item. `None` for items of other crates, and for a module
/// that is only imported: the items that are named through it count.
fn defining_module<'a>(source: &'a Crate, mention: &Mention) -> Option<&'a ModulePath> {
    let path = absolute(source, &mention.scope, &mention.path)?;
    let (module, item) = resolve(source, path, 0)?;
    (mention.is_glob || !item.is_empty()).then_some(module)
}

/// The absolute path of `path` in `scope`, from the crate's root on.
fn absolute(source: &Crate, scope: &ModulePath, path: &[String]) -> Option<Vec<String>> {
    let (first, rest) = path.split_first()?;
    let with = |base: &[String], rest: &[String]| Some([base, rest].concat());
    match first.as_str() {
        "crate" => with(&[], rest),
        "self" => with(scope, rest),
        "super" => absolute_in_parent(scope, rest),
        _ => {
            let child = [scope.as_slice(), std::slice::from_ref(first)].concat();
            let is_name = source.names.get(&(scope.clone(), first.clone()));
            if source.modules.contains_key(&child) || source.inline.contains(&child) {
                with(scope, path)
            } else {
                // `use a;` of another crate `a` stands for itself.
                is_name.filter(|meaning| meaning.as_slice() != [first.clone()])?;
                with(scope, path)
            }
        }
    }
}

/// The meaning of `super::` and then `rest` in `scope`.
fn absolute_in_parent(scope: &[String], rest: &[String]) -> Option<Vec<String>> {
    let (_, parent) = scope.split_last()?;
    match rest.first().map(String::as_str) {
        Some("super") => absolute_in_parent(parent, &rest[1..]),
        _ => Some([parent, rest].concat()),
    }
}

/// Follows an absolute path through imports and re-exports. Returns the file that defines the item,
/// and the rest of the path inside of that file.
fn resolve(source: &Crate, path: Vec<String>, hops: u32) -> Option<(&ModulePath, Vec<String>)> {
    // The longest part that is a scope, inline modules included.
    let is_scope =
        |path: &[String]| source.modules.contains_key(path) || source.inline.contains(path);
    let end = (0..=path.len()).rev().find(|end| is_scope(&path[..*end]))?;
    let (scope, rest) = (path[..end].to_vec(), &path[end..]);
    if hops < MAX_HOPS
        && let Some(first) = rest.first()
        && let Some(meaning) = source.names.get(&(scope.clone(), first.clone()))
    {
        let is_itself = meaning.as_slice() == [first.clone()];
        // Definitions of other crates do not count.
        let meaning = if is_itself { None } else { absolute(source, &scope, meaning) }?;
        return resolve(source, [meaning.as_slice(), &rest[1..]].concat(), hops + 1);
    }
    let file = (0..=scope.len()).rev().find_map(|end| source.modules.get_key_value(&scope[..end]));
    file.map(|(module, _)| (module, rest.to_vec()))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::tidy::source_file::SourceFile;

    fn circles(files: &[(&str, &str)]) -> Vec<Vec<String>> {
        let file = |(path, text): &(&str, &str)| SourceFile {
            path: Path::new("crates/x/src").join(path),
            text: (*text).into(),
        };
        let files: Vec<SourceFile> = files.iter().map(file).collect();
        let source = Crate::parse(Path::new("crates/x/src/lib.rs"), &files).unwrap();
        Graph::of(&source).circles().into_iter().map(|circle| circle.modules).collect()
    }

    #[test]
    fn a_circle_is_found_through_imports_and_paths() {
        let files = [
            ("lib.rs", "mod a; mod b; mod c;"),
            ("a.rs", "use crate::b::B; pub struct A(B);"),
            ("b.rs", "pub struct B; fn f() { super::c::g() }"),
            ("c.rs", "use crate::a; pub fn g() { a::h() }"),
        ];
        assert_eq!(circles(&files), [["a", "b", "c"]]);
    }

    #[test]
    fn folders_are_told_by_what_is_written() {
        let files = [
            ("lib.rs", "mod a; mod b; mod c;"),
            ("a/mod.rs", "pub mod part; pub use crate::c::C;"),
            ("a/part.rs", "use crate::b::B; pub struct Part(B);"),
            ("b.rs", "use crate::a::C; pub struct B(C);"),
            ("c.rs", "pub struct C;"),
        ];
        assert!(circles(&files).is_empty(), "a re-export leads elsewhere");
        let files = files.map(|(path, text)| SourceFile {
            path: Path::new("crates/x/src").join(path),
            text: text.into(),
        });
        let source = Crate::parse(Path::new("crates/x/src/lib.rs"), &files).unwrap();
        let found = Graph::of_folders(&source).circles();
        assert_eq!(found[0].modules, ["a", "b"]);
        assert_eq!(found.len(), 1);
    }

    #[test]
    fn a_facade_hides_no_arrow_and_is_none() {
        let files = [
            ("lib.rs", "mod a; mod b; pub use a::A; pub use b::B;"),
            ("a.rs", "use crate::B; pub struct A(B);"),
            ("b.rs", "pub struct B(crate::A);"),
        ];
        assert_eq!(circles(&files), [["a", "b"]]);
        let files = [
            ("lib.rs", "mod a; mod b; pub use a::A; pub use b::B;"),
            ("a.rs", "pub struct A;"),
            ("b.rs", "pub struct B(crate::A);"),
        ];
        assert!(circles(&files).is_empty(), "the root's exports are no arrows");
    }

    #[test]
    fn names_that_a_parent_imports_lead_to_where_they_are_defined() {
        let files = [
            ("lib.rs", "mod a; mod b;"),
            ("a/mod.rs", "mod part; use crate::b::B as Other; pub struct A(Other);"),
            ("a/part.rs", "pub struct Part(super::Other);"),
            ("b.rs", "pub struct B(crate::a::Deep); pub type C = crate::a::part::Part;"),
        ];
        assert_eq!(circles(&files), [["a", "a::part", "b"]]);
    }

    #[test]
    fn tests_and_other_crates_are_left_out() {
        let files = [
            ("lib.rs", "mod a; mod b; #[cfg(test)] mod check;"),
            (
                "a.rs",
                "use std::b; #[cfg(test)] use crate::b::B; pub struct A;
                      #[cfg(all(test, not(loom)))] mod tests { use crate::b::B; }",
            ),
            (
                "b.rs",
                "use crate::a::A; pub struct B(A); fn f() -> impl Fn() + use<'_> { crate::a::g() }",
            ),
            ("check.rs", "use crate::a; pub struct Check(a::A);"),
            ("main.rs", "fn main() {}"),
        ];
        assert!(circles(&files).is_empty());
    }

    #[test]
    fn a_module_and_one_part_of_it_may_name_each_other() {
        let files = [
            ("lib.rs", "mod a;"),
            ("a/mod.rs", "mod part; pub struct A(part::Part);"),
            ("a/part.rs", "use super::A; pub struct Part(Option<A>);"),
        ];
        assert!(circles(&files).is_empty());
    }

    #[test]
    fn the_way_round_names_files_and_lines() {
        let file = |path: &str, text: &str| SourceFile { path: path.into(), text: text.into() };
        let files = [
            file("lib.rs", "mod a;\nmod b;\n"),
            file("a.rs", "//! A.\nuse crate::b::B;\n"),
            file("b.rs", "//! B.\n\nfn f() { crate::a::A }\n"),
        ];
        let source = Crate::parse(Path::new("lib.rs"), &files).unwrap();
        let circles = Graph::of(&source).circles();
        let steps: Vec<_> =
            circles[0].steps.iter().map(|step| (&*step.from, &*step.to, step.line)).collect();
        assert_eq!(steps, [("a", "b", 2), ("b", "a", 3)]);
    }
}
