// Random numbers.
#pragma once

// Philox4x32 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011): four random words for a
// counter and a key. 7 rounds are the fewest that pass all of the paper's tests, and 10 are its default.
template <int ROUNDS = 10>
__device__ __forceinline__ uint4 philox(uint4 c, uint2 key) {
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
        unsigned high0 = __umulhi(0xD2511F53u, c.x), high2 = __umulhi(0xCD9E8D57u, c.z);
        c = make_uint4(high2 ^ c.y ^ key.x, 0xCD9E8D57u * c.z, high0 ^ c.w ^ key.y, 0xD2511F53u * c.x);
        key.x += 0x9E3779B9u;
        key.y += 0xBB67AE85u;
    }
    return c;
}
