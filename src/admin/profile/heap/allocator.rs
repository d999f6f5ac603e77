//! The samples of the memory allocator, jemalloc.
//!
//! jemalloc samples one allocation in so many bytes, with its stack, while sampling is on. A sample lives as long as
//! the allocation, also after sampling was switched off.
//!
//! This is the only unsafe code of the project: calls of jemalloc's control function. The crate that wraps it
//! (tikv-jemalloc-ctl) brings one that is unmaintained (paste).

#![expect(unsafe_code, reason = "the control function of jemalloc is written in C")]
#![deny(unsafe_op_in_unsafe_fn, clippy::undocumented_unsafe_blocks)]

use std::{ffi::CStr, io, ptr};

use tikv_jemalloc_sys::mallctl;

/// Returns true if allocations can be sampled, which the option `prof:false` prevents.
pub(super) fn can_sample() -> bool {
    read(c"opt.prof").unwrap_or_default()
}

/// Returns true if allocations are being sampled.
pub(super) fn is_sampling() -> io::Result<bool> {
    read(c"prof.active")
}

/// Switches sampling on or off.
pub(super) fn set_sampling(is_on: bool) -> io::Result<()> {
    // SAFETY: `prof.active` is written as a C `bool`, which has the size and the values of Rust's. jemalloc reads it
    // before it returns.
    unsafe { write(c"prof.active", is_on) }
}

/// Writes the samples into a file, in jemalloc's text format `heap_v2`.
pub(super) fn dump(path: &CStr) -> io::Result<()> {
    // SAFETY: `prof.dump` is written as a pointer to a C string. jemalloc does not keep it.
    unsafe { write(c"prof.dump", path.as_ptr()) }
}

fn read(name: &CStr) -> io::Result<bool> {
    let mut value = 0_u8;
    let mut size = size_of::<u8>();
    // SAFETY: the name ends with a zero byte. jemalloc writes at most `size` bytes, and refuses values of another size.
    let code = unsafe {
        mallctl(
            name.as_ptr(),
            (&raw mut value).cast(),
            &raw mut size,
            ptr::null_mut(),
            0,
        )
    };
    outcome(code)?;
    Ok(value != 0)
}

/// Writes a value.
///
/// # Safety
///
/// The type must be that of the name's value. A pointer must be valid until the function returns.
unsafe fn write<T>(name: &CStr, mut value: T) -> io::Result<()> {
    // SAFETY: the name ends with a zero byte, and jemalloc reads `size_of::<T>()` bytes of the value. The caller
    // guarantees its type.
    let code = unsafe {
        mallctl(
            name.as_ptr(),
            ptr::null_mut(),
            ptr::null_mut(),
            (&raw mut value).cast(),
            size_of::<T>(),
        )
    };
    outcome(code)
}

/// Returns the error of a call, which is an `errno`.
fn outcome(code: i32) -> io::Result<()> {
    match code {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}
