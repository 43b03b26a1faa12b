//! Internal snapshots of images.

use std::rc::Rc;

use serde_json::{Value, json};

use super::arguments::Arguments;
use super::context::Context;
use super::errors::{QmpError, Returned};

/// `blockdev-snapshot-internal-sync`.
pub(super) async fn create(context: &Rc<Context>, mut given: Arguments) -> Returned {
    let (device, name) = (given.text("device")?, given.text("name")?);
    given.end()?;
    let disk = context.disk(&device)?;
    if name.is_empty() {
        return Err(QmpError::generic("Name is empty"));
    }
    let known = context.call("snapshot.list", json!({ "disk": disk })).await?;
    if find(&known, None, Some(&name)).is_some() {
        return Err(QmpError::generic(format!(
            "Snapshot with name '{name}' already exists on device '{device}'"
        )));
    }
    context.call("snapshot.create", json!({ "disk": disk, "name": name })).await?;
    Ok(json!({}))
}

/// `blockdev-snapshot-delete-internal-sync`: returns the deleted snapshot.
pub(super) async fn delete(context: &Rc<Context>, mut given: Arguments) -> Returned {
    let device = given.text("device")?;
    let (id, name) = (given.some_text("id")?, given.some_text("name")?);
    given.end()?;
    let disk = context.disk(&device)?;
    if id.is_none() && name.is_none() {
        return Err(QmpError::generic("Name or id must be provided"));
    }
    let known = context.call("snapshot.list", json!({ "disk": disk })).await?;
    let Some(found) = find(&known, id.as_deref(), name.as_deref()) else {
        let word = |word: Option<String>| word.unwrap_or_else(|| "null".into());
        return Err(QmpError::generic(format!(
            "Snapshot with id '{}' and name '{}' does not exist on device '{device}'",
            word(id),
            word(name)
        )));
    };
    let words = [&found["name"], &found["id"]];
    let word = words.into_iter().find(|word| std::ptr::eq(meant(&known, word), found));
    let Some(word) = word else {
        return Err(QmpError::generic(format!(
            "Snapshot {} on device '{device}' has the name of another one, and its id is a name",
            found["id"]
        )));
    };
    context.call("snapshot.delete", json!({ "disk": disk, "name": word })).await?;
    Ok(found.clone())
}

/// The snapshot that a word refers to: the first one with this name, else the one with this id.
fn meant<'a>(known: &'a Value, word: &Value) -> &'a Value {
    let all = || known.as_array().into_iter().flatten();
    let by_name = all().find(|one| one["name"] == *word);
    by_name.or_else(|| all().find(|one| one["id"] == *word)).unwrap_or(&Value::Null)
}

/// The snapshot of an id, a name, or both.
fn find<'a>(known: &'a Value, id: Option<&str>, name: Option<&str>) -> Option<&'a Value> {
    let is = |one: &Value, key: &str, word: Option<&str>| word.is_none_or(|word| one[key] == word);
    let mut known = known.as_array()?.iter();
    known.find(|one| is(one, "id", id) && is(one, "name", name))
}
