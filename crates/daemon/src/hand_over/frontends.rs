//! Conversion of paused vhost-user-blk front-ends to records of the format and back.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use anyhow::{Context, Error, Result};
use blockhouse_core::WriteCache;
use blockhouse_vhost_user::{Kick, PausedFrontend, PausedVring, PausedWriteCache};

use super::format::{Cache, Frontend, KickName, Vring as Ring};

/// The format's record of a front-end, and its descriptors in the format's order.
pub fn record(paused: &PausedFrontend) -> (Frontend, Vec<BorrowedFd<'_>>) {
    let mut descriptors = vec![paused.connection.as_fd()];
    descriptors.extend(paused.memory.iter().map(|(_, file)| file.as_fd()));
    descriptors.extend(paused.inflight.iter().map(|(_, file)| file.as_fd()));
    descriptors.extend(paused.log.iter().map(|(_, file)| file.as_fd()));
    let PausedFrontend { log_call, backend_channel, .. } = paused;
    descriptors.extend([log_call, backend_channel].into_iter().flatten().map(AsFd::as_fd));
    for PausedVring { kick, call, error, .. } in &paused.vrings {
        if let Some(Kick::Event(event)) = kick {
            descriptors.push(event.as_fd());
        }
        descriptors.extend([call, error].into_iter().flatten().map(AsFd::as_fd));
    }
    let cache = paused.write_cache;
    let record = Frontend {
        features: paused.features,
        protocol_features: paused.protocol_features,
        memory: paused.memory.iter().map(|(region, _)| *region).collect(),
        inflight: paused.inflight.as_ref().map(|(inflight, _)| *inflight),
        log: paused.log.as_ref().map(|(log, _)| *log),
        has_log_call: log_call.is_some(),
        has_backend_channel: backend_channel.is_some(),
        write_cache: Cache {
            is_volatile: cache.reported == WriteCache::Volatile,
            driver_flushes: cache.driver_flushes,
            is_restored: cache.is_restored,
        },
        vrings: paused.vrings.iter().map(ring).collect(),
    };
    (record, descriptors)
}

fn ring(vring: &PausedVring) -> Ring {
    let PausedVring { size, base, is_enabled, is_running, .. } = *vring;
    Ring {
        size,
        addresses: vring.addresses,
        base,
        kick: vring.kick.as_ref().map(|kick| match kick {
            Kick::Event(_) => KickName::Event,
            Kick::Polled => KickName::Polled,
        }),
        has_call: vring.call.is_some(),
        has_error: vring.error.is_some(),
        is_enabled,
        is_running,
    }
}

/// The front-end of a record; takes its descriptors from the start of `descriptors`.
///
/// # Errors
/// There are too few descriptors.
pub fn front_end(record: Frontend, descriptors: &mut VecDeque<OwnedFd>) -> Result<PausedFrontend> {
    let mut next = || descriptors.pop_front().context("a front-end's descriptor is missing");
    let connection = next()?;
    let memory = record.memory.into_iter();
    let memory = memory.map(|region| Ok((region, next()?))).collect::<Result<_>>()?;
    let inflight = record.inflight.map(|inflight| Ok::<_, Error>((inflight, next()?)));
    let inflight = inflight.transpose()?;
    let log = record.log.map(|log| Ok::<_, Error>((log, next()?))).transpose()?;
    let log_call = record.has_log_call.then(&mut next).transpose()?;
    let backend_channel = record.has_backend_channel.then(&mut next).transpose()?;
    let vring = |ring: Ring| {
        let kick = match ring.kick {
            Some(KickName::Event) => Some(Kick::Event(next()?)),
            Some(KickName::Polled) => Some(Kick::Polled),
            None => None,
        };
        let call = ring.has_call.then(&mut next).transpose()?;
        let error = ring.has_error.then(&mut next).transpose()?;
        let Ring { size, addresses, base, is_enabled, is_running, .. } = ring;
        Ok(PausedVring { size, addresses, base, kick, call, error, is_enabled, is_running })
    };
    let vrings = record.vrings.into_iter().map(vring).collect::<Result<_>>()?;
    let Frontend { features, protocol_features, write_cache, .. } = record;
    let write_cache = PausedWriteCache {
        reported: if write_cache.is_volatile { WriteCache::Volatile } else { WriteCache::None },
        driver_flushes: write_cache.driver_flushes,
        is_restored: write_cache.is_restored,
    };
    Ok(PausedFrontend {
        connection,
        features,
        protocol_features,
        memory,
        inflight,
        log,
        log_call,
        backend_channel,
        write_cache,
        vrings,
    })
}
