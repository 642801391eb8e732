# cmake -DBUGS=bugs.cmake -DROOMS=csrc -DFILE=shard/ledger.c -DOUT=ledger.c
#       -P plant.cmake: writes the file with its bugs.
file(READ "${ROOMS}/${FILE}" text)

macro(bug name file old new)
    if("${file}" STREQUAL "${FILE}")
        string(FIND "${text}" "${old}" first)
        string(FIND "${text}" "${old}" last REVERSE)
        if(first EQUAL -1 OR NOT first EQUAL last)
            message(FATAL_ERROR "bugs.cmake: the old text of bug ${name} does "
                "not occur once in ${file}")
        endif()
        string(REPLACE "${old}" "${new}" text "${text}")
    endif()
endmacro()

macro(model_bug name)
endmacro()

include("${BUGS}")
file(WRITE "${OUT}"
    "int sim_bug(const char *name);\n#line 1 \"${ROOMS}/${FILE}\"\n${text}")
