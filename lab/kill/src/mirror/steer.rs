//! Which request a server with a mirror gets before it is killed, and its answer.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use fastrand::Rng;
use lab_tools::control::{Answer, Control};
use serde_json::{Value, json};

use super::target::{Kind, Target};

/// The longest time until a mirror is ready, on a busy machine.
const READY_LIMIT: Duration = Duration::from_secs(120);
const PAUSE: Duration = Duration::from_millis(1);
/// Part of an error that a mirror may fail with although nothing is wrong: the machine is busy.
const TOO_LATE: &str = "takes longer than";
const JOB: &str = "mirror";

/// When the server is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// While the mirror copies, or before.
    Copying,
    /// When the mirror is ready.
    Ready,
    /// While the mirror completes; the guest continues on this server.
    Switching,
    /// While the mirror completes; the guest is to continue on another server.
    HandingOver,
    /// When the guest already uses the target.
    Switched,
    /// While the mirror is cancelled, or after.
    Cancelling,
}

/// All moments; some more than once, so that they are more likely.
pub const MOMENTS: [Moment; 9] = [
    Moment::Copying,
    Moment::Copying,
    Moment::Ready,
    Moment::Switching,
    Moment::Switching,
    Moment::Switching,
    Moment::HandingOver,
    Moment::Switched,
    Moment::Cancelling,
];

impl Moment {
    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Copying => "copying",
            Self::Ready => "ready",
            Self::Switching => "switching",
            Self::HandingOver => "handing over",
            Self::Switched => "switched",
            Self::Cancelling => "cancelling",
        }
    }
}

/// What the server said about the mirror before it was killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// The mirror has not begun to complete.
    Source,
    /// The mirror is complete.
    Target,
    /// The server was asked to complete the mirror, and did not answer.
    Nothing,
}

/// The last request to a server before it was killed.
pub enum Asked {
    /// Not a request to complete the mirror.
    Other,
    /// A request to complete, which the server has answered.
    Answered(Told),
    /// A request to complete without an answer yet; its number.
    Complete(u64),
}

impl Asked {
    /// What the server said about the mirror before its end.
    pub fn told(self, control: &mut Control) -> Result<Told> {
        match self {
            Self::Other => Ok(Told::Source),
            Self::Answered(told) => Ok(told),
            Self::Complete(id) => match control.answer_to(id)? {
                None => Ok(Told::Nothing),
                Some(answer) => told_by(answer),
            },
        }
    }
}

fn told_by(answer: Answer) -> Result<Told> {
    match answer {
        Ok(_) => Ok(Told::Target),
        Err(error) if error.contains(TOO_LATE) => Ok(Told::Source),
        Err(error) => bail!("the mirror failed: {error}"),
    }
}

/// Begins a mirror, and brings it near to the moment of the kill. Returns the last request. The
/// server writes the file `record` before the mirror is complete.
pub fn steer(
    control: &mut Control,
    (target, record): (&Target, &Path),
    moment: Moment,
    random: &mut Rng,
    drain: &mut dyn FnMut() -> Result<()>,
) -> Result<Asked> {
    wait(random, 20_000);
    let is_slow = moment == Moment::Copying && random.bool();
    let mode = ["auto", "background", "write-blocking"][random.usize(..3)];
    let start = json!({
        "kind": "mirror", "disk": "disk", "job": JOB, "target": target.location(),
        "format": if matches!(target.kind, Kind::File { .. }) { target.kind.format() } else { "raw" },
        "overwrite": !matches!(target.kind, Kind::File { .. }),
        "mode": if moment == Moment::Copying { mode } else { "auto" },
        "speed": if is_slow { 8 << 20 } else { 0 },
    });
    let begun = control.send("job.start", &start)?;
    if moment == Moment::Copying {
        wait(random, if is_slow { 2_000_000 } else { 200_000 });
        return Ok(Asked::Other);
    }
    let begun = control.answer_to(begun)?.context("the server ended by itself")?;
    begun.map_err(anyhow::Error::msg).context("job.start")?;
    if moment == Moment::Cancelling {
        wait(random, 200_000);
        control.send("job.cancel", &json!({ "job": JOB }))?;
        wait(random, 40_000);
        return Ok(Asked::Other);
    }
    wait_ready(control)?;
    let hand_over = moment == Moment::HandingOver;
    if hand_over {
        // The job demands that the guest is paused before the hand-over.
        drain()?;
    }
    if moment == Moment::Ready {
        wait(random, 200_000);
        return Ok(Asked::Other);
    }
    let complete = control.send("job.complete", &json!({ "job": JOB, "hand-over": hand_over }))?;
    if moment == Moment::Switched {
        let answer = control.answer_to(complete)?.context("the server ended by itself")?;
        wait(random, 200_000);
        return told_by(answer).map(Asked::Answered);
    }
    if random.bool() {
        // The switch happens in the first milliseconds after the record exists.
        wait_for(record)?;
        std::thread::sleep(Duration::from_micros(random.u64(..6_000)));
    } else {
        wait(random, 400_000);
    }
    Ok(Asked::Complete(complete))
}

/// Waits until a file is there.
fn wait_for(file: &Path) -> Result<()> {
    let end = Instant::now() + READY_LIMIT;
    while !file.exists() {
        ensure!(Instant::now() < end, "no {} after {READY_LIMIT:?}", file.display());
        std::thread::yield_now();
    }
    Ok(())
}

/// Waits up to `most` microseconds. Short times are more likely, because more changes at the
/// beginning.
fn wait(random: &mut Rng, most: u64) {
    let most = if random.bool() { most } else { most / 8 };
    std::thread::sleep(Duration::from_micros(random.u64(..most)));
}

fn wait_ready(control: &mut Control) -> Result<()> {
    let end = Instant::now() + READY_LIMIT;
    loop {
        let jobs = control.call("job.list", &json!({}))?.map_err(anyhow::Error::msg)?;
        let job = jobs.as_array().and_then(|jobs| jobs.iter().find(|job| job["job"] == JOB));
        match job.map(|job| &job["status"]).and_then(Value::as_str) {
            Some("ready") => return Ok(()),
            Some("running") => {}
            _ => bail!("the mirror does not become ready: {jobs}"),
        }
        ensure!(Instant::now() < end, "the mirror is not ready after {READY_LIMIT:?}: {jobs}");
        std::thread::sleep(PAUSE);
    }
}
