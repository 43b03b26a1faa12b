//! Makes system calls in a thread of another process, as an attacker can who has taken it over.
//!
//! ptrace(2) stops the thread, sets its registers for a call and executes one instruction. So the
//! call is subject to all restrictions of the thread: its user, namespaces, Landlock, seccomp,
//! AppArmor. Then the registers are restored and the thread continues. Root may trace every
//! process.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result, bail, ensure};
use nix::libc::{c_long, user_regs_struct};
use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

/// The instruction `syscall`.
const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// How far below the stack pointer the memory for arguments begins: only the first 128 bytes below
/// the stack pointer may be in use.
const BELOW_STACK: u64 = 2048;
/// How many bytes of a mapping are searched at most.
const MAX_SEARCHED: u64 = 16 << 20;

/// An argument of a call.
#[derive(Clone, Copy)]
pub enum Argument<'a> {
    Number(u64),
    /// The address of these bytes.
    Memory(&'a [u8]),
}

/// The end of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A result, or an errno below zero.
    Returned(i64),
    /// The process was killed because of the call.
    Ended,
}

/// A thread that is stopped until this is dropped.
pub struct StoppedThread {
    thread: Pid,
    memory: File,
    /// The address of a `syscall` instruction in its memory.
    instruction: u64,
    saved: user_regs_struct,
    has_ended: bool,
}

impl StoppedThread {
    /// Stops a thread of a process.
    pub fn stop(process: i32, thread: i32) -> Result<Self> {
        let path = format!("/proc/{process}/mem");
        let memory = OpenOptions::new().read(true).write(true).open(&path).context(path)?;
        let instruction = find_instruction(process, &memory)?;
        let thread = Pid::from_raw(thread);
        ptrace::attach(thread).with_context(|| format!("cannot trace {thread}"))?;
        let status = wait(thread)?;
        ensure!(matches!(status, WaitStatus::Stopped(..)), "{thread} does not stop: {status:?}");
        let saved = ptrace::getregs(thread)?;
        Ok(Self { thread, memory, instruction, saved, has_ended: false })
    }

    /// Makes a system call in the thread.
    pub fn call(&mut self, number: c_long, arguments: &[Argument<'_>]) -> Result<Outcome> {
        ensure!(!self.has_ended, "the process has ended");
        let mut words = [0; 6];
        let mut free = (self.saved.rsp - BELOW_STACK) & !15;
        for (word, argument) in words.iter_mut().zip(arguments) {
            *word = match *argument {
                Argument::Number(number) => number,
                Argument::Memory(bytes) => {
                    let address = free;
                    self.memory.write_all_at(bytes, address).context("its stack")?;
                    free += bytes.len().next_multiple_of(16) as u64;
                    address
                }
            };
        }
        let mut registers = self.saved;
        registers.rax = number as u64;
        // With this value the kernel does not take the call for the one that was interrupted, and
        // restarts none.
        registers.orig_rax = u64::MAX;
        registers.rip = self.instruction;
        [registers.rdi, registers.rsi, registers.rdx, registers.r10, registers.r8, registers.r9] =
            words;
        ptrace::setregs(self.thread, registers)?;
        ptrace::step(self.thread, None)?;
        match wait(self.thread)? {
            WaitStatus::Stopped(_, Signal::SIGTRAP) => {
                Ok(Outcome::Returned(ptrace::getregs(self.thread)?.rax as i64))
            }
            WaitStatus::Exited(..) | WaitStatus::Signaled(..) => {
                self.has_ended = true;
                Ok(Outcome::Ended)
            }
            other => bail!("call {number} of {} did not end: {other:?}", self.thread),
        }
    }

    /// Makes a call that may be refused; `None` if it was, or if the process was killed because of
    /// it.
    pub fn attempt(&mut self, number: c_long, arguments: &[Argument<'_>]) -> Result<Option<i64>> {
        Ok(match self.call(number, arguments)? {
            Outcome::Returned(result) => Some(result).filter(|result| *result >= 0),
            Outcome::Ended => None,
        })
    }
}

impl Drop for StoppedThread {
    fn drop(&mut self) {
        if !self.has_ended {
            let restored = ptrace::setregs(self.thread, self.saved);
            let released = ptrace::detach(self.thread, None);
            if let Err(error) = restored.and(released) {
                eprintln!("{} does not go on: {error}", self.thread);
            }
        }
    }
}

fn wait(thread: Pid) -> Result<WaitStatus> {
    // __WALL: the thread may be another than its process's first one.
    waitpid(thread, Some(WaitPidFlag::__WALL)).with_context(|| format!("cannot wait for {thread}"))
}

/// Finds the address of a `syscall` instruction in executable memory of a process.
fn find_instruction(process: i32, memory: &File) -> Result<u64> {
    let maps = std::fs::read_to_string(format!("/proc/{process}/maps"))?;
    for line in maps.lines().filter(|line| line.contains(" r-xp ")) {
        let range = line.split_whitespace().next().and_then(|range| range.split_once('-'));
        let (start, end) = range.context("a mapping without a range")?;
        let [start, end] = [start, end].map(|text| u64::from_str_radix(text, 16));
        let (start, end) = (start?, end?);
        let mut bytes = vec![0; (end - start).min(MAX_SEARCHED) as usize];
        if memory.read_exact_at(&mut bytes, start).is_err() {
            // A page of the kernel, as vsyscall.
            continue;
        }
        if let Some(at) = bytes.windows(SYSCALL.len()).position(|window| window == SYSCALL) {
            return Ok(start + at as u64);
        }
    }
    bail!("process {process} has no instruction for system calls")
}
