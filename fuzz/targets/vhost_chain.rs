//! A guest's memory with anything in it: every chain of descriptors is decoded, rejected or breaks
//! the queue, in a bounded number of steps, and the requests that come of it lie inside of the
//! memory.
#![no_main]
#![forbid(unsafe_code)]

use std::sync::Arc;

use blockhouse_core::{Durability, Request};
use blockhouse_engine::{FaultDomain, GuestMemory, GuestRegion, SharedMemory};
use blockhouse_vhost_user::block::{
    BlockRequests, MAX_RANGES, RequestContext, RequestLimits, decode,
};
use blockhouse_vhost_user::ring::{Chain, MAX_CHAIN};
use libfuzzer_sys::fuzz_target;

/// Bytes of memory, of the table at its start, and its place in the guest.
const SIZE: usize = 16 << 10;
const TABLE: usize = 32 * 16;
const GUEST: u64 = 0x1000;

thread_local! {
    static MEMORY: Arc<GuestMemory> = make_memory();
}

fn make_memory() -> Arc<GuestMemory> {
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let file = rustix::fs::memfd_create("guest", flags).expect("memory");
    rustix::fs::ftruncate(&file, SIZE as u64).expect("memory");
    let mut guest = GuestMemory::new();
    let domain = FaultDomain::unconnected();
    // In two regions side by side, so that buffers cross from one to the other.
    for half in 0..2 {
        let offset = half * SIZE as u64 / 2;
        let memory = Arc::new(SharedMemory::map(&file, offset, SIZE / 2, &domain).expect("memory"));
        assert!(guest.add(GuestRegion { guest: GUEST + offset, user_addr: 0, memory }));
    }
    Arc::new(guest)
}

fn check(request: Request) {
    let bytes = |segments: &[blockhouse_core::Segment]| -> usize {
        segments.iter().map(|segment| segment.length).sum()
    };
    match request {
        Request::Read { into: vector, .. } | Request::Write { from: vector, .. } => {
            assert!(!vector.is_empty() && vector.len().is_multiple_of(512));
            assert_eq!(bytes(vector.segments()), vector.len());
            // Each buffer lies inside of the memory, so each segment does.
            assert!(vector.segments().iter().all(|segment| segment.length <= SIZE / 2));
        }
        Request::Flush | Request::Discard { .. } | Request::WriteZeroes { .. } => {}
        Request::Prefetch { .. } => panic!("no request of a guest is a prefetch"),
    }
}

fuzz_target!(|data: &[u8]| {
    let Some((&head, content)) = data.split_first() else { return };
    let content = &content[..content.len().min(SIZE)];
    MEMORY.with(|memory| {
        assert!(memory.write(GUEST, &[0; 2048]) && memory.write(GUEST, content));
        let table = memory.view(GUEST, TABLE).expect("the table is there");
        let mut chain = Chain::default();
        if chain.walk(memory, &table, head.into()).is_err() {
            return;
        }
        assert!(chain.readable().len() + chain.writable().len() <= MAX_CHAIN);
        assert!(memory.view(chain.status(), 1).is_some());
        let limits = RequestLimits::of(0);
        let durability = Durability::Data;
        let context = RequestContext { durability, serial: &[7; 20], size: 1 << 40, limits };
        match decode(&context, memory, &mut chain) {
            Ok(BlockRequests::One(request)) => check(request),
            Ok(BlockRequests::Many(requests)) => {
                assert!((1..=MAX_RANGES as usize).contains(&requests.len()));
                requests.into_iter().for_each(check);
            }
            Ok(BlockRequests::None) | Err(_) => {}
        }
    });
});
