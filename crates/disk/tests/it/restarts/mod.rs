//! Servers that are killed and started again, over images of every layout: the next process has
//! every answered request, covered by a flush or not; after a loss of power every durable one is,
//! whatever has died before. No image is corrupt, and life goes on.
//!
//! Without memory that outlives the process (`State::Off`) qcow2 images keep what is durable.

pub mod layout;
mod planted;
pub mod service;
mod space;

use std::sync::atomic::{AtomicU64, Ordering};

use blockhouse_sim::{Rng, SeedSelection, for_seeds};

use layout::Layout;
use service::{Sound, State, explore};

/// Explores random seeds of layouts. Returns how many changes were replayed.
fn restart(test: &str, seeds: u64, layout: fn(&mut Rng) -> Layout, state: State) -> u64 {
    let name = format!("restarts::{test}");
    let replayed = AtomicU64::new(0);
    let report = for_seeds(env!("CARGO_PKG_NAME"), &name, seeds, |seed| {
        let explored = explore(seed, &layout(&mut Rng::with_seed(seed)), state, Sound)?;
        replayed.fetch_add(explored.1, Ordering::Relaxed);
        Ok(explored.0)
    });
    if SeedSelection::of_this_run() == SeedSelection::Default {
        assert!(report.deaths > 0 && report.crashes > 0, "{report:?}");
    }
    replayed.into_inner()
}

#[test]
fn crash_at_every_death_of_a_server_of_raw_images() {
    restart("crash_at_every_death_of_a_server_of_raw_images", 400, Layout::raw, State::Kept);
}

#[test]
fn crash_at_every_death_of_a_server_of_qcow2_images() {
    let test = "crash_at_every_death_of_a_server_of_qcow2_images";
    let replays = || restart(test, 250, Layout::qcow2, State::Kept) > 0;
    // One in 25 seeds replays a change. A quarter of the seeds may have none of these.
    let is_one = SeedSelection::of_this_run() == SeedSelection::One;
    assert!((0..4).any(|_| replays()) || is_one, "nothing was replayed");
}

/// A start fails only where the device is full.
#[test]
fn crash_at_every_death_of_a_server_of_a_device() {
    let test = "crash_at_every_death_of_a_server_of_a_device";
    restart(test, 250, Layout::qcow2_on_device, State::Kept);
}

#[test]
fn crash_at_every_death_of_a_server_without_state() {
    let test = "crash_at_every_death_of_a_server_without_state";
    restart(test, 100, Layout::qcow2, State::Off);
}
