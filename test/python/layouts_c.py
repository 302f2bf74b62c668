#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes a C program that prints the size of every struct of gpuloan.h, offset and size of each field, and every enumerator; and
the same of DLPack's structs, as its specification has them. Argument: gpuloan.h."""
import re
import sys

with open(sys.argv[1], encoding="utf-8") as file:
    header = re.sub(r"/\*.*?\*/", "", file.read(), flags=re.DOTALL)

DLPACK = """
typedef struct { int32_t device_type; int32_t device_id; } DLDevice;
typedef struct { uint8_t code; uint8_t bits; uint16_t lanes; } DLDataType;
typedef struct { void *data; DLDevice device; int32_t ndim; DLDataType dtype; int64_t *shape; int64_t *strides;
  uint64_t byte_offset; } DLTensor;
typedef struct DLManagedTensor { DLTensor dl_tensor; void *manager_ctx; void (*deleter)(struct DLManagedTensor *); } DLManagedTensor;
typedef struct { uint32_t major; uint32_t minor; } DLPackVersion;
typedef struct DLManagedTensorVersioned { DLPackVersion version; void *manager_ctx; void (*deleter)(struct DLManagedTensorVersioned *);
  uint64_t flags; DLTensor dl_tensor; } DLManagedTensorVersioned;
"""
FIELDS = {
    "DLTensor": ["data", "device.device_type", "device.device_id", "ndim", "dtype.code", "dtype.bits", "dtype.lanes", "shape", "strides",
                 "byte_offset"],
    "DLManagedTensor": ["dl_tensor", "manager_ctx", "deleter"],
    "DLManagedTensorVersioned": ["version.major", "version.minor", "manager_ctx", "deleter", "flags", "dl_tensor"],
}
for name, body in re.findall(r"typedef struct (gpuloan_\w+) \{(.*?)\} \1;", header, re.DOTALL):
    FIELDS[name] = [re.sub(r"\[.*?\]", "", field).split()[-1].lstrip("*") for field in body.split(";") if field.strip()]
enumerators = re.findall(r"\b(GPULOAN_\w+)\s*=", re.sub(r"#define[^\n]*", "", header))

print("#include <inttypes.h>\n#include <stddef.h>\n#include <stdio.h>\n#include <gpuloan/gpuloan.h>")
print(DLPACK + "int main(void) {")
for name, fields in FIELDS.items():
    print(f'  printf("struct {name} %zu\\n", sizeof({name}));')
    for field in fields:
        print(f'  printf("field {name} {field} %zu %zu\\n", offsetof({name}, {field}), sizeof((({name} *)0)->{field}));')
for name in enumerators:
    print(f'  printf("enum {name} %lld\\n", (long long){name});')
print("  return 0;\n}")
