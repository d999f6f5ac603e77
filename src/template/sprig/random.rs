//! Random texts and numbers, if the host has randomness.

use super::{
    super::{
        limits::Failure,
        text::{Text, chars},
        types::Type,
        value::{Context, Function, Value},
    },
    bytes,
    encoding::hexadecimal,
    int, of_strings,
};

const DIGITS: &[u8] = b"0123456789";
const LETTERS: &[u8] = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";

pub(super) fn functions() -> Vec<Function> {
    use Type::String;
    let from_set = |name: &str, set: Vec<u8>| {
        Function::new(name, &[Type::INT], String, move |context, arguments| {
            let count = usize::try_from(int(arguments, 0)).unwrap_or(0);
            context.allocate(count)?;
            context.step(count)?;
            let mut out = Vec::with_capacity(count);
            for _ in 0..count {
                out.push(set[below(context, set.len() as u64)? as usize]);
            }
            Ok(out.into())
        })
    };
    vec![
        from_set("randNumeric", DIGITS.to_vec()),
        from_set("randAlpha", LETTERS.to_vec()),
        from_set("randAlphaNum", [LETTERS, DIGITS].concat()),
        from_set("randAscii", (b' '..=b'~').collect()),
        Function::new("randInt", &[Type::INT, Type::INT], Type::INT, |context, arguments| {
            let (least, beyond) = (int(arguments, 0), int(arguments, 1));
            let count = beyond.wrapping_sub(least);
            let count = u64::try_from(count).ok().filter(|count| *count > 0);
            let count = count.ok_or_else(|| Failure::message("invalid argument to Intn"))?;
            Ok(Value::int(least.wrapping_add(below(context, count)? as i64)))
        }),
        Function::new("randBytes", &[Type::INT], String, |context, arguments| {
            use base64::{Engine, engine::general_purpose::STANDARD};
            let count = usize::try_from(int(arguments, 0));
            let count = count.map_err(|_| Failure::message("runtime error: makeslice: len out of range"))?;
            context.allocate(count.saturating_mul(3))?;
            let mut buffer = vec![0; count];
            fill(context, &mut buffer)?;
            Ok(STANDARD.encode(buffer).into())
        }),
        Function::new("uuidv4", &[], String, |context, _| {
            let mut buffer = [0; 16];
            fill(context, &mut buffer)?;
            buffer[6] = buffer[6] & 0x0f | 0x40;
            buffer[8] = buffer[8] & 0x3f | 0x80;
            let digits = hexadecimal(&buffer);
            let parts = [
                &digits[..8],
                &digits[8..12],
                &digits[12..16],
                &digits[16..20],
                &digits[20..],
            ];
            Ok(parts.join("-").into())
        }),
        of_strings("shuffle", 1, String, |context, arguments| {
            let mut characters: Vec<char> = chars(bytes(arguments, 0)).map(|(character, _)| character).collect();
            context.allocate(characters.len().saturating_mul(4))?;
            context.step(characters.len())?;
            for last in (1..characters.len()).rev() {
                let other = below(context, last as u64 + 1)? as usize;
                characters.swap(last, other);
            }
            Ok(Value::String(Text::from(
                characters.into_iter().collect::<std::string::String>(),
            )))
        }),
    ]
}

fn fill(context: &Context<'_>, buffer: &mut [u8]) -> Result<(), Failure> {
    if context.host.fill_random(buffer) {
        Ok(())
    } else {
        Err(Failure::message("there is no source of randomness"))
    }
}

/// Returns a random number below a bound that is not 0. The bias is below 2⁻⁶⁴ of the bound.
fn below(context: &Context<'_>, bound: u64) -> Result<u64, Failure> {
    let mut buffer = [0; 16];
    fill(context, &mut buffer)?;
    Ok((u128::from_be_bytes(buffer) % u128::from(bound)) as u64)
}
