//! Tests of a queue with a simulated driver, on a separate loop and image.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Mutex;
use std::sync::mpsc::channel;
use std::task::{Poll, Waker};

use blockhouse_disk::ImageFormat;
use blockhouse_engine::{EngineChoice, EventLoop, spawn};
use blockhouse_images::{ImageOptions, create, open};

use super::*;

const DEPTH: u16 = 4;
const MEMORY: usize = 64 << 10;
const SIZE: u64 = 1 << 20;

/// `UBLK_IO_OP_`, and the flag for FUA.
const READ: u32 = 0;
const WRITE: u32 = 1 | 1 << 13;
const WRITE_ZEROES: u32 = 5;

/// The result of a tag's request, and the tag's memory.
type Answer = (i32, Vec<u8>);

/// The bytes in the kernel's pages.
type PageBytes = Arc<Mutex<Vec<u8>>>;

/// The kernel's side of a tag.
#[derive(Default)]
struct Tag {
    descriptor: UblkDescriptor,
    /// Data for the server.
    data: Vec<u8>,
    has_request: bool,
    waiter: Option<Waker>,
    answers: VecDeque<Answer>,
    /// The pages of its requests, if their data stays there. [`FakeTags`] takes them.
    pages: Option<Arc<KernelPages>>,
    /// The bytes in the pages.
    page_bytes: Option<PageBytes>,
}

impl Tag {
    /// A tag whose data stays in pages. The server can copy them if `can_copy`.
    fn with_pages(can_copy: bool) -> Self {
        let bytes = PageBytes::default();
        let source = Arc::clone(&bytes);
        let copy_out = move |memory: &mut [u8]| {
            memory.copy_from_slice(&source.lock().expect("no panic")[..memory.len()]);
            can_copy
        };
        let pages = Some(Arc::new(KernelPages::new(None, copy_out)));
        Self { pages, page_bytes: Some(bytes), ..Self::default() }
    }
}

#[derive(Default)]
struct Kernel {
    tags: RefCell<Vec<Tag>>,
    is_stopped: Cell<bool>,
    /// If set, the driver refuses all commands with this errno.
    refusal: Cell<Option<i32>>,
    gate: Arc<Gate>,
}

/// The kernel, and the pages of its tags.
struct FakeTags(Rc<Kernel>, Vec<Option<Arc<KernelPages>>>);

impl FakeTags {
    fn of(kernel: &Rc<Kernel>) -> Self {
        let pages = |tag: &mut Tag| tag.pages.take();
        Self(Rc::clone(kernel), kernel.tags.borrow_mut().iter_mut().map(pages).collect())
    }
}

impl Kernel {
    fn new(tag: fn() -> Tag) -> Rc<Self> {
        let tags = (0..DEPTH).map(|_| tag()).collect();
        Rc::new(Self { tags: RefCell::new(tags), ..Self::default() })
    }

    /// Passes a request to a tag, and waits for its result.
    async fn request(&self, tag: u16, descriptor: UblkDescriptor, data: &[u8]) -> Answer {
        {
            let tag = &mut self.tags.borrow_mut()[usize::from(tag)];
            (tag.descriptor, tag.data, tag.has_request) = (descriptor, data.to_vec(), true);
            tag.waiter.take().into_iter().for_each(Waker::wake);
        }
        loop {
            if let Some(answer) = self.tags.borrow_mut()[usize::from(tag)].answers.pop_front() {
                return answer;
            }
            sleep(Duration::from_micros(100)).await;
        }
    }

    fn stop(&self) {
        self.is_stopped.set(true);
        let mut tags = self.tags.borrow_mut();
        tags.iter_mut().filter_map(|tag| tag.waiter.take()).for_each(Waker::wake);
    }

    async fn next(&self, tag: u16, mut memory: IoVector) -> io::Result<()> {
        poll_fn(|context| {
            let tag = &mut self.tags.borrow_mut()[usize::from(tag)];
            if let Some(code) = self.refusal.get() {
                return Poll::Ready(Err(io::Error::from_raw_os_error(code)));
            }
            if self.is_stopped.get() {
                return Poll::Ready(Err(io::Error::from_raw_os_error(errno::ENODEV)));
            }
            if !tag.has_request {
                tag.waiter = Some(context.waker().clone());
                return Poll::Pending;
            }
            tag.has_request = false;
            let mut bytes = tag.data.clone();
            bytes.resize(MEMORY, 0xee);
            match &tag.page_bytes {
                Some(pages) => *pages.lock().expect("no panic") = bytes,
                None => memory.copy_from(&bytes),
            }
            Poll::Ready(Ok(()))
        })
        .await
    }
}

impl Tags for FakeTags {
    fn depth(&self) -> u16 {
        DEPTH
    }

    fn max_io_bytes(&self) -> usize {
        MEMORY
    }

    fn descriptor(&self, tag: u16) -> UblkDescriptor {
        self.0.tags.borrow()[usize::from(tag)].descriptor
    }

    async fn fetch(&self, tag: u16, memory: IoVector) -> io::Result<()> {
        self.0.next(tag, memory).await
    }

    async fn commit(&self, tag: u16, result: i32, memory: IoVector) -> io::Result<()> {
        let mut bytes = vec![0; memory.len()];
        memory.copy_to(&mut bytes);
        if let Some(pages) = &self.0.tags.borrow()[usize::from(tag)].page_bytes {
            bytes.clone_from(&pages.lock().expect("no panic"));
        }
        self.0.tags.borrow_mut()[usize::from(tag)].answers.push_back((result, bytes));
        self.0.next(tag, memory).await
    }

    fn pages(&self, tag: u16) -> Option<&Arc<KernelPages>> {
        self.1[usize::from(tag)].as_ref()
    }

    fn store(&self, tag: u16, start: usize, bytes: &[u8]) -> io::Result<()> {
        let tags = self.0.tags.borrow();
        let pages = tags[usize::from(tag)].page_bytes.as_ref().expect("a tag with pages");
        pages.lock().expect("no panic")[start..start + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }
}

fn served<S: Storage>(disk: &Arc<Disk<S>>, kernel: &Kernel) -> Served<S> {
    let (disk, gate) = (Arc::clone(disk), Arc::clone(&kernel.gate));
    Served { disk, durability: Durability::None, gate }
}

/// Runs `guest` against a queue of a new disk, on the best engine of this host.
fn with_queue<F: Future<Output = ()>>(guest: impl FnOnce(Rc<Kernel>) -> F) {
    with_queue_of(Tag::default, guest);
}

/// As [`with_queue`], with tags that `tag` makes.
fn with_queue_of<F: Future<Output = ()>>(tag: fn() -> Tag, guest: impl FnOnce(Rc<Kernel>) -> F) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("disk.img");
    let mut event_loop = EventLoop::new(EngineChoice::Auto).expect("a loop");
    event_loop.block_on(async {
        create(&path, SIZE, ImageFormat::Raw).await.expect("an image");
        let disk = Arc::new(open(&path, ImageOptions::default()).await.expect("a disk"));
        let (kernel, (sender, fetched)) = (Kernel::new(tag), channel());
        let served = served(&disk, &kernel);
        let queue = spawn(run(FakeTags::of(&kernel), served, sender));
        guest(Rc::clone(&kernel)).await;
        kernel.stop();
        queue.await;
        fetched.recv().expect("it tells").expect("all tags are fetched");
        let disk = Arc::into_inner(disk).expect("the queue has ended");
        disk.close().await.expect("it closes");
    });
}

fn at(operation: u32, start_sector: u64, sectors: u32) -> UblkDescriptor {
    UblkDescriptor { operation, sectors, start_sector }
}

#[test]
fn tags_are_served_side_by_side_with_their_own_bytes() {
    with_queue(serve_side_by_side);
}

#[test]
fn data_in_the_kernels_pages_is_taken_from_there_and_left_there() {
    with_queue_of(|| Tag::with_pages(true), serve_side_by_side);
}

#[test]
fn a_write_whose_pages_cannot_be_copied_fails_and_stores_nothing() {
    with_queue_of(
        || Tag::with_pages(false),
        |kernel| async move {
            assert_eq!(kernel.request(0, at(WRITE, 0, 8), &[1; 4096]).await.0, -errno::EFAULT);
            let (result, bytes) = kernel.request(1, at(READ, 0, 8), &[]).await;
            assert!(result == 4096 && bytes[..4096].iter().all(|byte| *byte == 0));
        },
    );
}

async fn serve_side_by_side(kernel: Rc<Kernel>) {
    for round in 0..3_u8 {
        for tag in 0..DEPTH {
            let data = [round * 16 + tag as u8 + 1; 4096];
            let write = at(WRITE, u64::from(tag) * 8, 8);
            let (result, _) = kernel.request(tag, write, &data).await;
            assert_eq!(result, 4096);
        }
        for tag in 0..DEPTH {
            // A tag other than the one that wrote.
            let read = at(READ, u64::from((tag + 1) % DEPTH) * 8, 8);
            let (result, bytes) = kernel.request(tag, read, &[]).await;
            assert_eq!(result, 4096);
            let expected = round * 16 + ((tag + 1) % DEPTH) as u8 + 1;
            assert!(bytes[..4096].iter().all(|byte| *byte == expected));
            assert!(bytes[4096..].iter().all(|byte| *byte == 0xee), "beyond the request");
        }
    }
    assert_eq!(kernel.request(0, at(WRITE_ZEROES, 0, 8), &[]).await.0, 0);
    let (result, bytes) = kernel.request(1, at(READ, 0, 8), &[]).await;
    assert!(result == 4096 && bytes[..4096].iter().all(|byte| *byte == 0));
}

#[test]
fn a_request_that_fails_is_answered_with_its_errno_and_the_tag_goes_on() {
    with_queue(|kernel| async move {
        let past_end = SIZE / 512;
        assert_eq!(kernel.request(0, at(WRITE, past_end, 8), &[]).await.0, -errno::ENOSPC);
        assert_eq!(kernel.request(0, at(READ, past_end, 8), &[]).await.0, -errno::EINVAL);
        // Longer than a tag's memory, and an operation that is not offered.
        assert_eq!(kernel.request(0, at(READ, 0, 129), &[]).await.0, -errno::EINVAL);
        assert_eq!(kernel.request(0, at(10, 0, 8), &[]).await.0, -errno::EOPNOTSUPP);
        assert_eq!(kernel.request(0, at(READ, 0, 128), &[]).await.0, MEMORY as i32);
    });
}

#[test]
fn requests_wait_while_another_process_may_take_over() {
    with_queue(|kernel| async move {
        let write = at(WRITE, 0, 8);
        assert_eq!(kernel.request(0, write, &[1; 4096]).await.0, 4096);
        kernel.gate.shut().await;
        let waiting = spawn({
            let kernel = Rc::clone(&kernel);
            async move { kernel.request(1, write, &[2; 4096]).await.0 }
        });
        sleep(Duration::from_millis(20)).await;
        let answers = kernel.tags.borrow()[1].answers.len();
        assert!(!kernel.tags.borrow()[1].has_request && answers == 0, "it was taken, and waits");
        kernel.gate.open();
        assert_eq!(waiting.await, 4096);
    });
}

#[test]
fn a_driver_that_refuses_tags_ends_the_queue_and_says_why() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("disk.img");
    let mut event_loop = EventLoop::new(EngineChoice::Auto).expect("a loop");
    event_loop.block_on(async {
        create(&path, SIZE, ImageFormat::Raw).await.expect("an image");
        let disk = Arc::new(open(&path, ImageOptions::default()).await.expect("a disk"));
        let (kernel, (sender, fetched)) = (Kernel::new(Tag::default), channel());
        kernel.refusal.set(Some(errno::EINVAL));
        let served = served(&disk, &kernel);
        run(FakeTags::of(&kernel), served, sender).await;
        let error = fetched.recv().expect("it tells").expect_err("it was refused");
        assert_eq!(error.raw_os_error(), Some(errno::EINVAL));
        assert!(fetched.recv().is_err(), "it tells once");
    });
}
