//! `blockhouse snapshot`: the snapshots inside an image.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::Result;
use blockhouse_disk::{Access, Disk, ImageFormat, ImageOptions, Locking, Snapshot, open_alone};
use blockhouse_engine::{EngineChoice, EventLoop, HostFile};

use crate::looked_at::read_only;
use serde_json::json;

/// Arguments of `snapshot`.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Tell which snapshots an image has.
    List {
        #[command(flatten)]
        image: Image,
        /// Print JSON with the keys of `qemu-img info --output=json`.
        #[arg(long)]
        json: bool,
    },
    /// Take a snapshot of the disk.
    Create {
        #[command(flatten)]
        image: Image,
        /// What to call it: 1 to 255 bytes, unlike all others.
        name: String,
    },
    /// Make the disk what it was when the snapshot was taken. What was written since is gone.
    Apply {
        #[command(flatten)]
        image: Image,
        /// The snapshot's name, or its id.
        name: String,
    },
    /// Delete a snapshot.
    Delete {
        #[command(flatten)]
        image: Image,
        /// The snapshot's name, or its id.
        name: String,
    },
    /// Give a snapshot another name.
    Rename {
        #[command(flatten)]
        image: Image,
        /// The snapshot's name, or its id.
        name: String,
        /// What to call it from now on.
        new_name: String,
    },
}

/// The image.
#[derive(clap::Args)]
struct Image {
    /// The image's format; left out, the file's name decides (.qcow2, otherwise raw).
    #[arg(long, short, value_parser = clap::builder::ValueParser::new(str::parse::<ImageFormat>))]
    format: Option<ImageFormat>,
    /// The image. Nobody else may be using it, except for `list`.
    image: PathBuf,
}

/// Runs the command.
pub fn run(arguments: Arguments) -> Result<()> {
    let mut event_loop = EventLoop::new(EngineChoice::Auto)?;
    event_loop.block_on(async {
        match arguments.action {
            Action::List { image, json } => list(&image, json).await,
            Action::Create { image, name } => {
                let disk = open_to_change(&image).await?;
                disk.create_snapshot(&name).await?;
                Ok(disk.close().await?)
            }
            Action::Apply { image, name } => {
                let disk = open_to_change(&image).await?;
                disk.apply_snapshot(&name).await?;
                Ok(disk.close().await?)
            }
            Action::Delete { image, name } => {
                let disk = open_to_change(&image).await?;
                disk.delete_snapshot(&name).await?;
                Ok(disk.close().await?)
            }
            Action::Rename { image, name, new_name } => {
                let disk = open_to_change(&image).await?;
                disk.rename_snapshot(&name, &new_name).await?;
                Ok(disk.close().await?)
            }
        }
    })
}

async fn open_to_change(image: &Image) -> Result<Disk<HostFile>> {
    open(&image.image, image.format, Access::ReadWrite, Locking::Held).await
}

async fn open(
    path: &Path,
    format: Option<ImageFormat>,
    access: Access,
    locking: Locking,
) -> Result<Disk<HostFile>> {
    let options = ImageOptions { access, locking, ..read_only(format) };
    // The tables are all that is needed.
    Ok(open_alone(path, options).await?)
}

async fn list(image: &Image, json: bool) -> Result<()> {
    let disk = open(&image.image, image.format, Access::ReadOnly, Locking::None).await?;
    let snapshots = disk.snapshots().await?;
    let text = if json { as_json(&snapshots) } else { as_text(&snapshots) };
    if !text.is_empty() {
        // Nobody reading is no failure of ours.
        let _ = writeln!(std::io::stdout(), "{text}");
    }
    Ok(())
}

fn as_text(snapshots: &[Snapshot]) -> String {
    if snapshots.is_empty() {
        return String::new();
    }
    let line = |id: &str, name: &str, state: &str, age: &str, clock: &str| {
        format!("{id:<9} {name:<24} {state:>14} {age:>12} {clock:>14}")
    };
    let heading = line("ID", "NAME", "VM STATE", "AGE", "VM CLOCK");
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let lines = snapshots.iter().map(|one| {
        let age = age(now.saturating_sub(one.created));
        // Names are anybody's: nothing of them reaches the terminal but text.
        let name = one.name.escape_debug().to_string();
        line(&one.id, &name, &one.vm_state_size.to_string(), &age, &clock(one.vm_clock))
    });
    std::iter::once(heading).chain(lines).collect::<Vec<_>>().join("\n")
}

/// The two largest units.
fn age(age: Duration) -> String {
    let seconds = age.as_secs();
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match () {
        () if days > 0 => format!("{days} d {} h", hours % 24),
        () if hours > 0 => format!("{hours} h {} min", minutes % 60),
        () if minutes > 0 => format!("{minutes} min {} s", seconds % 60),
        () => format!("{seconds} s"),
    }
}

fn clock(clock: Duration) -> String {
    let (seconds, milliseconds) = (clock.as_secs(), clock.subsec_millis());
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    format!("{hours:02}:{minutes:02}:{:02}.{milliseconds:03}", seconds % 60)
}

fn as_json(snapshots: &[Snapshot]) -> String {
    let values: Vec<_> = snapshots
        .iter()
        .map(|one| {
            let mut value = json!({
                "id": one.id,
                "name": one.name,
                "vm-state-size": one.vm_state_size,
                "date-sec": one.created.as_secs(),
                "date-nsec": one.created.subsec_nanos(),
                "vm-clock-sec": one.vm_clock.as_secs(),
                "vm-clock-nsec": one.vm_clock.subsec_nanos(),
            });
            if let Some(count) = one.instruction_count {
                value["icount"] = count.into();
            }
            value
        })
        .collect();
    format!("{:#}", json!(values))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_told_in_units_that_fit() {
        assert_eq!(age(Duration::from_secs(59)), "59 s");
        assert_eq!(age(Duration::from_secs(3 * 60 + 4)), "3 min 4 s");
        assert_eq!(age(Duration::from_secs(2 * 86_400 + 5 * 3600 + 9)), "2 d 5 h");
        assert_eq!(clock(Duration::from_millis(3_723_045)), "01:02:03.045");
    }
}
