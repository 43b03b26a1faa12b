//! Front-ends of vhost-user-blk devices as they cross the socket pair, and back.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use anyhow::{Context, Result};
use blockhouse_core::WriteCache;
use blockhouse_vhost_user::{
    InflightDescription, Kick, LogDescription, MemoryRegion, PausedFrontend, PausedVring,
    PausedWriteCache, UserAddresses,
};

use super::format::{
    Cache, Frontend, Inflight, KickName, Log, Region, RingAddresses, Vring as Ring,
};

/// A front-end as the format has it, and its descriptors in the format's order.
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
    let region = |(region, _): &(MemoryRegion, _)| {
        let MemoryRegion { guest, size, user, offset } = *region;
        Region { guest, size, user, offset }
    };
    let inflight = |(inflight, _): &(InflightDescription, _)| {
        let InflightDescription { size, offset, queues, entries } = *inflight;
        Inflight { size, offset, queues, entries }
    };
    let log = |(log, _): &(LogDescription, _)| Log { size: log.size, offset: log.offset };
    let cache = paused.write_cache;
    let record = Frontend {
        features: paused.features,
        protocol_features: paused.protocol_features,
        memory: paused.memory.iter().map(region).collect(),
        inflight: paused.inflight.as_ref().map(inflight),
        log: paused.log.as_ref().map(log),
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
    let addresses = |addresses: UserAddresses| {
        let UserAddresses { descriptors, available, used, log } = addresses;
        RingAddresses { descriptors, available, used, log }
    };
    Ring {
        size,
        addresses: vring.addresses.map(addresses),
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

/// The front-end of a record, with the next of the descriptors.
///
/// # Errors
/// When there are too few.
pub fn front_end(record: Frontend, descriptors: &mut VecDeque<OwnedFd>) -> Result<PausedFrontend> {
    let mut next = || descriptors.pop_front().context("a front-end's descriptor is missing");
    let connection = next()?;
    let region = |Region { guest, size, user, offset }| {
        Ok((MemoryRegion { guest, size, user, offset }, next()?))
    };
    let memory = record.memory.into_iter().map(region).collect::<Result<_>>()?;
    let inflight = |Inflight { size, offset, queues, entries }| {
        Ok::<_, anyhow::Error>((InflightDescription { size, offset, queues, entries }, next()?))
    };
    let inflight = record.inflight.map(inflight).transpose()?;
    let log =
        |Log { size, offset }| Ok::<_, anyhow::Error>((LogDescription { size, offset }, next()?));
    let log = record.log.map(log).transpose()?;
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
        let addresses = |addresses| {
            let RingAddresses { descriptors, available, used, log } = addresses;
            UserAddresses { descriptors, available, used, log }
        };
        let addresses = ring.addresses.map(addresses);
        let Ring { size, base, is_enabled, is_running, .. } = ring;
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
